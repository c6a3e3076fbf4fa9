"""What LLM agents send, and the tools that send it to an Irminsul server.

- ``traces``: recorded sessions, read from files
- ``synthetic``: sessions made up from a seed, for machines without a recorded trace
- ``scenarios``: the ways in which agent harnesses change a prompt from one turn to the next
- ``replay``: sends sessions to a server, several at once, and sums up tokens and times
- ``cli``: the ``replay`` command
- ``agent_text``: made-up tool schemas, results, policies, dialogues and logs
- ``facts``: prompts whose questions have one right answer, and training lessons of such questions
- ``words``: the names that facts are about, and their values

No name is imported here; import the modules.
"""

__version__ = "0.1.0"

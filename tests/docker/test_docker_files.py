"""The Docker files, without a Docker engine: what they must say, and that they fit the repository and each other."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
PORTS = ["8000", "8001", "8002"]


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) of the Dockerfile in order, continued lines joined and comments left out."""
    text = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines()
    return [(name.upper(), rest.strip()) for name, rest in (line.split(maxsplit=1) for line in joined)]


def arguments(name: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == name]


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
    return loaded


class TestDockerfile:
    def test_one_pinned_ngc_image_without_known_holes(self) -> None:
        """NVIDIA's bulletins of 2025 and 2026 name 25.07 to 26.03 as the releases that mend them."""
        (image,) = arguments("FROM")
        tag = re.fullmatch(r"nvcr\.io/nvidia/tritonserver:(\d\d)\.(\d\d)-py3", image)
        assert tag
        assert (int(tag[1]), int(tag[2])) >= (26, 3)
        for text in ("docker/Dockerfile", "docs/security.md"):
            assert f"{tag[1]}.{tag[2]}" in (ROOT / text).read_text(encoding="utf-8"), text

    def test_does_not_run_as_root(self) -> None:
        (user,) = arguments("USER")
        assert int(user) > 0
        after = [name for name, _ in instructions()]
        assert after.index("USER") > max(i for i, name in enumerate(after) if name == "RUN")
        assert re.search(rf"useradd .*--uid {user}\b", " ".join(arguments("RUN")))

    def test_entry_point_is_irminsul_serve_on_all_addresses(self) -> None:
        (entry,) = arguments("ENTRYPOINT")
        command = json.loads(entry)
        assert command[:2] == ["irminsul", "serve"]
        flags = dict(zip(command[2::2], command[3::2], strict=True))
        expected = dict(zip(["--http-port", "--grpc-port", "--metrics-port"], PORTS, strict=True))
        assert flags == {"--host": "0.0.0.0", **expected}
        assert arguments("EXPOSE") == [" ".join(PORTS)]

    def test_the_command_knows_these_flags(self) -> None:
        from irminsul_backend.commands import main as cli

        source = Path(cli.__file__).read_text(encoding="utf-8")
        assert '"--host"' in source
        assert 'f"--{name}-port"' in source

    def test_health_check_asks_for_readiness(self) -> None:
        (check,) = arguments("HEALTHCHECK")
        options, _, command = check.partition("CMD ")
        assert "--start-period=" in options
        program = json.loads(command)
        assert program[:2] == ["python3", "-c"]
        compile(program[2], "healthcheck", "exec")
        assert f"http://127.0.0.1:{PORTS[0]}/v2/health/ready" in program[2]

    def test_everything_copied_exists_and_is_not_ignored(self) -> None:
        patterns = (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
        allowed = {line[1:] for line in patterns if line.startswith("!")}
        sources = [source for copy in arguments("COPY") for source in copy.split()[:-1]]
        assert {"kernels", "client", "loadtest", "irminsul_backend", "model_repository"} <= set(sources)
        for source in sources:
            assert (ROOT / source).exists(), source
        assert set(sources) == allowed

    def test_installs_all_packages_with_an_old_numpy(self) -> None:
        runs = " ".join(arguments("RUN"))
        assert '"numpy<2" ./kernels ./client ./loadtest ".[serve]"' in runs
        for folder in (".", "client", "kernels"):
            assert re.search(r'"numpy>=[\d.]+,<2"', (ROOT / folder / "pyproject.toml").read_text(encoding="utf-8")), (
                folder
            )

    def test_constraints_that_pip_accepts(self, tmp_path: Path) -> None:
        """The Dockerfile's own sed, run on the real file: no extras, no torch, every line pinned."""
        (script,) = [m[1] for run in arguments("RUN") if (m := re.search(r"(sed .*?) > /tmp/constraints", run))]
        out = subprocess.run(script, shell=True, cwd=ROOT, capture_output=True, check=True, encoding="utf-8").stdout
        lines = [line for line in out.splitlines() if line and not line.startswith("#")]
        assert any(line.startswith("numpy==1.") for line in lines)
        for line in lines:
            assert re.match(r"[A-Za-z0-9_.-]+==\S+", line), line
            assert not line.startswith(("torch==", "triton=="))

    def test_hadolint_has_nothing_to_say(self) -> None:
        program = shutil.which("hadolint")
        if program is None:
            pytest.skip("hadolint is not installed")
        result = subprocess.run([program, str(DOCKER / "Dockerfile")], capture_output=True, encoding="utf-8")
        assert (result.returncode, result.stdout) == (0, "")


class TestCompose:
    def test_fits_the_compose_schema(self, compose: dict[str, Any]) -> None:
        package = importlib.util.find_spec("check_jsonschema")
        if package is None or package.origin is None:
            pytest.skip("check-jsonschema, which carries the compose schema, is not installed")
        import jsonschema

        schema = Path(package.origin).parent / "builtin_schemas" / "vendor" / "compose-spec.json"
        jsonschema.validate(compose, json.loads(schema.read_text(encoding="utf-8")))

    def test_only_known_keys(self, compose: dict[str, Any]) -> None:
        top = {"name", "services", "volumes", "networks", "configs", "secrets"}
        assert {key for key in compose if not key.startswith("x-")} <= top
        known = {"image", "profiles", "build", "init", "restart", "shm_size", "stop_grace_period", "security_opt"}
        known |= {"environment", "volumes", "ports", "networks", "healthcheck", "deploy", "depends_on", "command"}
        known |= {"cap_drop"}
        for name, service in compose["services"].items():
            assert service.keys() <= known, name

    def test_profiles(self, compose: dict[str, Any]) -> None:
        profiles = {name: service["profiles"] for name, service in compose["services"].items()}
        assert profiles == {
            "irminsul-cpu": ["cpu"],
            "irminsul-gpu": ["gpu"],
            "envoy": ["cpu", "gpu"],
            "prometheus": ["metrics"],
        }

    @pytest.mark.parametrize("name", ["irminsul-cpu", "irminsul-gpu"])
    def test_servers(self, compose: dict[str, Any], name: str) -> None:
        service = compose["services"][name]
        assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        (metrics,) = service["ports"]  # the others are Envoy's
        assert re.fullmatch(rf"127\.0\.0\.1:.*:{PORTS[2]}", metrics)
        assert service["healthcheck"]["test"][1:] == json.loads(arguments("HEALTHCHECK")[0].partition("CMD ")[2])
        assert any(volume.endswith(":/models:ro") for volume in service["volumes"])
        assert service["environment"]["IRMINSUL_DEVICE"] == {"irminsul-cpu": "cpu", "irminsul-gpu": "cuda"}[name]

    def test_only_the_gpu_service_asks_for_a_gpu(self, compose: dict[str, Any]) -> None:
        (device,) = compose["services"]["irminsul-gpu"]["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
        assert "deploy" not in compose["services"]["irminsul-cpu"]

    def test_shared_memory_is_enough(self, compose: dict[str, Any]) -> None:
        from irminsul_backend.config import ServerConfig
        from irminsul_backend.triton_io.server.installation import shared_memory_needed

        needed = shared_memory_needed(ServerConfig().max_text_bytes)
        for name in ("irminsul-cpu", "irminsul-gpu"):
            size = re.fullmatch(r"(\d+)gb", compose["services"][name]["shm_size"])
            assert size is not None
            assert int(size[1]) << 30 >= 2 * needed

    def test_variables_are_settings_of_the_server(self, compose: dict[str, Any]) -> None:

        known = {"image", "profiles", "build", "init", "restart", "shm_size", "stop_grace_period", "security_opt"}
        known |= {"environment", "volumes", "ports", "networks", "healthcheck", "deploy", "depends_on", "command"}
        known |= {"cap_drop"}
        for name, service in compose["services"].items():
            tag = service["image"].rpartition(":")[2]
            assert tag != "latest"
            assert "build" in service or re.fullmatch(r"v\d+\.\d+\.\d+", tag), name

    def test_prometheus_scrapes_the_alias_that_both_servers_have(self, compose: dict[str, Any]) -> None:
        config = yaml.safe_load((DOCKER / "prometheus.yml").read_text(encoding="utf-8"))
        (target,) = config["scrape_configs"][0]["static_configs"][0]["targets"]
        host, _, port = target.partition(":")
        assert port == PORTS[2]
        for name in ("irminsul-cpu", "irminsul-gpu"):
            assert host in compose["services"][name]["networks"]["default"]["aliases"]
        mounted = [v.split(":")[0] for v in compose["services"]["prometheus"]["volumes"] if v.startswith("./")]
        assert mounted == ["./prometheus.yml"]
        assert "prometheus-data" in compose["volumes"]

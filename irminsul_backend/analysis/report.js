// The page itself: reads the inlined JSON, keeps what is chosen, draws the sections anew when a choice changes.

function report(message) {
  document.body.dataset.error = message;
  const box = document.getElementById("error") || document.body.appendChild(h("div", { id: "error", role: "alert" }));
  box.textContent = "This page could not be drawn: " + message;
}
window.addEventListener("error", (event) => report(event.message));

const data = JSON.parse(document.getElementById("data").textContent);
const results = data.results;
const unique = (name, list = results) => [...new Set(list.map((r) => r[name]))];
const prefer = (list, first) => (list.includes(first) ? first : list[0]);
const chosen = {
  scenario: prefer(unique("scenario"), "asis"),
  preset: prefer(unique("preset"), "default"),
  file: results[0].file,
  whole: true,
  prompt: -1,
};
const find = (wanted) => results.find((r) => Object.entries(wanted).every(([k, v]) => r[k] === v));
/** The chosen result, or the nearest to it where not every combination was replayed. */
function current() {
  const { file, scenario, preset } = chosen;
  return find({ file, scenario, preset }) || find({ file, scenario }) || find({ file, preset }) || find({ file });
}

const page = document.getElementById("page");
const part = (id) => page.appendChild(h("section", { id }));

function select(label, options, value, change) {
  const box = h("select", { onchange: () => change(box.value) },
    options.map(([v, words]) => h("option", { value: v, selected: String(v) === String(value) ? "" : null }, words)));
  return h("label", {}, label, box);
}

function choices() {
  const pick = (name, label) => {
    const values = unique(name);
    return values.length > 1 && select(label, values.map((v) => [v, v]), chosen[name], (v) => choose({ [name]: v }));
  };
  const boxes = [pick("file", "File"), pick("scenario", "Scenario"), pick("preset", "Preset")].filter(Boolean);
  return boxes.length ? h("div", { class: "tools", id: "choices" }, boxes) : null;
}

function choose(change) {
  const focused = document.activeElement && document.activeElement.closest("label, button");
  const words = focused && focused.firstChild && focused.firstChild.textContent;
  Object.assign(chosen, change);
  if (!("prompt" in change) && !("whole" in change)) chosen.prompt = -1;
  draw();
  // What had the focus was replaced: give it to its successor.
  const again = [...page.querySelectorAll("label, button")].find((e) => e.firstChild && e.firstChild.textContent === words);
  if (words && again) (again.querySelector("select") || again).focus();
}

// The results of all files under the chosen scenario and preset.
function summary(section) {
  const same = unique("file").map((file) => find({ file, scenario: chosen.scenario, preset: chosen.preset })).filter(Boolean);
  const shown = same.length ? same : [current()];
  const names = ["sessions", "prompts", "tokens", "exact", "blocks", "content", "computed", "segments"];
  const sums = Object.fromEntries(names.map((name) => [name, shown.reduce((sum, r) => sum + r[name], 0)]));
  const bound = shown.every((r) => r.bound !== null) ? shown.reduce((sum, r) => sum + r.bound, 0) : null;
  const figure = (name, words) => h("div", { class: `figure ${name}` }, h("b", {}, pct(sums[name], sums.tokens)),
    h("span", {}, words), h("span", { class: "soft" }, counted(sums[name], "token")));
  const fewer = sums.computed ? (sums.tokens - sums.exact) / sums.computed : 0;
  fill(section, {}, [
    h("p", { class: "soft" }, [shown.length > 1 ? counted(shown.length, "file") : shown[0].file, counted(sums.sessions, "session"),
      counted(sums.prompts, "prompt"), counted(sums.tokens, "token"), `scenario ${shown[0].scenario}`, `preset ${shown[0].preset}`].join(" · ")),
    h("div", { class: "figures" },
      figure("exact", "exact prefix: any prefix cache saves these"),
      figure("content", "reused beyond it, wherever the text moved"),
      figure("computed", "computed: new to the cache")),
    bar(sums, { big: true, bound }),
    legend(bound !== null),
    h("p", { class: "verdict" }, !sums.tokens ? "There are no prompts in these files." :
      fewer >= 1.05 ? [`Of every 1,000 prompt tokens a prefix cache computes ${num(Math.round(1000 * share(sums.tokens - sums.exact, sums.tokens)))}; with reuse by content it is ${num(Math.round(1000 * share(sums.computed, sums.tokens)))}. `,
        h("strong", {}, `That is ${fewer >= 100 ? num(Math.round(fewer)) : fewer.toFixed(1)} times less prefill.`)]
      : "A prefix cache already saves nearly all that can be saved in this traffic."),
    h("p", { class: "note" }, `Counted in whole blocks, as engines with paged caches do, the exact prefix is ${pct(sums.blocks, sums.tokens)}. ` +
      `Reuse beyond it comes in ${(sums.segments / Math.max(sums.prompts, 1)).toFixed(1)} segments per prompt` +
      (bound ? `, and is ${pct(sums.content, bound)} of what any matcher could find.` : ".")),
    shown.length > 1 && fileRows(shown),
  ]);
}

function fileRows(shown) {
  return h("ul", { class: "rows", id: "files" }, shown.map((r) => row(
    h("button", { class: "link", "aria-pressed": String(r.file === chosen.file), onclick: () => choose({ file: r.file }) }, r.file),
    bar(r, { bound: r.bound }), [h("b", {}, pct(r.content, r.tokens)), " beyond ", pct(r.exact, r.tokens), " exact"])));
}
const row = (name, chart, numbers, ...more) => h("li", {}, h("span", { class: "name" }, name), chart,
  h("span", { class: "numbers" }, numbers), more.flat().map((m) => m && h("div", { class: "wide" }, m)));

function timeline(section, result) {
  const button = (whole, words) => h("button", { "aria-pressed": String(chosen.whole === whole), onclick: () => choose({ whole }) }, words);
  fill(section, {}, [
    h("h2", {}, "Source of tokens over time"),
    h("p", { class: "note" }, "Each column is " + (result.bins.length && result.bins[0][0] > 1 ? `${num(result.bins[0][0])} prompts in a row` : "a prompt") + ", as they came. Click one, or press Enter on it, to see its segments below."),
    h("div", { class: "tools" }, h("div", { class: "switch", role: "group", "aria-label": "Unit" }, button(true, "Share"), button(false, "Tokens per prompt"))),
  ]);
  if (!result.bins.length) return void section.append(h("p", { class: "soft" }, "No prompts."));
  const plot = section.appendChild(h("div", { class: "plot" }));
  plot.append(drawTimeline(plot.clientWidth, result, chosen.whole, (from, until) => {
    const near = result.kept.reduce((best, p, i) => {
      const away = (q) => (q.index < from ? from - q.index : q.index >= until ? q.index - until + 1 : 0);
      return best < 0 || away(p) < away(result.kept[best]) ? i : best;
    }, -1);
    if (near >= 0) {
      choose({ prompt: near });
      document.getElementById("map").focus({ preventScroll: true });
      document.getElementById("prompt").scrollIntoView({ block: "nearest" });
    }
  }));
  section.append(legend(false));
}

const sessionName = (result, p) => `session ${result.names[p.session] || num(p.session)}`;
function best(kept, value) {
  return kept.reduce((top, p, i) => (value(p) > value(kept[top]) ? i : top), 0);
}
const reused = (p) => p.content;
const segments = (p) => p.segments.filter((x, i) => i % 4 === 3 && !x).length;

function promptMap(section, result) {
  const kept = result.kept;
  section.append(h("h2", {}, "Inside one prompt"));
  if (!kept.length) return void section.append(h("p", { class: "soft" }, "No prompt of this file is kept in this report."));
  if (chosen.prompt < 0 || chosen.prompt >= kept.length) chosen.prompt = best(kept, reused);
  const prompt = kept[chosen.prompt];
  const list = pieces(prompt);
  const go = (i) => choose({ prompt: Number(i) });
  const sessions = new Map(kept.map((p, i) => [p.session, i]).reverse());
  const turns = kept.map((p, i) => [i, p]).filter(([, p]) => p.session === prompt.session);
  fill(section, {}, [
    kept.length < result.prompts && h("p", { class: "note", id: "sample" }, `The segments of ${num(kept.length)} of ${counted(result.prompts, "prompt")} are kept here: ` +
      "the largest, those with most segments, and an even spread. All other figures count every prompt."),
    h("div", { class: "tools" },
      select("Session", [...sessions].sort((a, b) => a[0] - b[0]).map(([, i]) => [i, sessionName(result, kept[i])]), sessions.get(prompt.session), go),
      select("Turn", turns.map(([i, p]) => [i, `turn ${num(p.turn)} · ${short(p.tokens)} tokens`]), chosen.prompt, go),
      h("button", { disabled: chosen.prompt ? null : "", onclick: () => go(chosen.prompt - 1) }, "‹ Previous"),
      h("button", { disabled: chosen.prompt < kept.length - 1 ? null : "", onclick: () => go(chosen.prompt + 1) }, "Next ›"),
      h("button", { onclick: () => go(best(kept, reused)) }, "Most reused"),
      h("button", { onclick: () => go(best(kept, segments)) }, "Most segments"),
      h("button", { onclick: () => go(best(kept, (p) => p.tokens)) }, "Longest")),
    h("p", {}, h("strong", {}, `Prompt ${num(prompt.index + 1)} of ${num(result.prompts)}: ${counted(prompt.tokens, "token")}. `),
      `${num(prompt.exact)} exact prefix (${pct(prompt.exact, prompt.tokens)}), ${num(prompt.content)} reused beyond it in ` +
      `${counted(segments(prompt), "segment")} (${pct(prompt.content, prompt.tokens)}), ${num(prompt.computed)} computed (${pct(prompt.computed, prompt.tokens)}).`),
    prompt.breaks.map(([position, cause, lost]) => h("p", { class: "note" },
      `At position ${num(position)}, the mark on the map, it leaves the most similar prompt before it: ${cause}. A prefix cache loses ${counted(lost, "known token")} after it.`)),
  ]);
  const plot = section.appendChild(h("div", { class: "plot" }));
  if (prompt.content) plot.append(drawRibbons(plot.clientWidth, prompt, list));
  const rows = section.appendChild(h("div", { class: "plot" }));
  rows.append(drawMap(rows.clientWidth, prompt, list));
  section.append(h("ul", { class: "legend" },
    [SOURCES[0], SOURCES[2]].map(([name, words]) => h("li", {}, h("i", { class: name }), words)),
    h("li", {}, "reused, by shift δ:"), SHIFTS.map(([name, words]) => h("li", {}, h("i", { class: name }), words))));
  section.append(segmentTable(list));
}

function segmentTable(list) {
  const most = 1000;
  const details = h("details", { ontoggle: () => details.open && details.children.length < 2 && details.append(
    h("div", { class: "scroll", tabindex: 0 }, h("table", {},
      h("thead", {}, h("tr", {}, ["source", "position", "tokens", "δ", "position in the donor"].map((t) => h("th", { scope: "col" }, t)))),
      h("tbody", {}, list.slice(0, most).map((p) => h("tr", {}, h("th", { scope: "row" }, SOURCES.find(([name]) => name === p.kind)[1]),
        h("td", {}, num(p.start)), h("td", {}, num(p.length)),
        h("td", {}, p.kind === "computed" ? "" : signed(p.delta)), h("td", {}, p.kind === "computed" ? "" : num(p.start - p.delta))))))),
    list.length > most && h("p", { class: "note" }, `The first ${num(most)} of ${num(list.length)}.`) || "") },
    h("summary", {}, `The ${counted(list.length, "piece")} as a table`));
  return details;
}

function causes(section, result) {
  const most = Math.max(...result.causes.map((c) => c.lost), 1);
  fill(section, {}, [
    h("h2", {}, "Why prefixes break"),
    h("p", { class: "note" }, "Where each prompt first differs from the most similar one before it, and the known tokens after that place, which a prefix cache computes again."),
    h("ul", { class: "rows causes" }, result.causes.map((c) => row(c.name,
      h("div", { class: "chart", role: "img", "aria-label": `${pct(c.lost, result.tokens)} of all tokens` }, h("div", { class: "lost", style: `width:${(100 * c.lost) / most}%` })),
      [h("b", {}, counted(c.lost, "token")), ` (${pct(c.lost, result.tokens)}) in ${counted(c.prompts, "prompt")}`],
      [c.advice && h("span", {}, c.advice), c.examples.length > 0 && h("details", {}, h("summary", {}, c.examples.length > 1 ? `The ${c.examples.length} costliest` : "The costliest"),
        h("ul", { class: "examples" }, c.examples.map(example)))]))),
  ]);
}

function example(e) {
  const quote = [["same", e.before], ["was", e.was], ["now", e.now]].filter(([, text]) => text);
  return h("li", {}, `session ${e.name || (e.session ? num(e.session) : "?")}, turn ${num(e.turn)}, position ${num(e.position)}: ${counted(e.lost, "token")} lost`,
    quote.length > 0 && h("dl", { class: "quote" }, quote.map(([name, text]) => [h("dt", {}, name), h("dd", {}, text)])));
}

function presets(section, result) {
  const same = results.filter((r) => r.file === result.file && r.scenario === result.scenario);
  const bound = same.map((r) => r.bound).find((b) => b !== null);
  const per = (r) => (r.segments / Math.max(r.prompts, 1)).toFixed(1);
  const scenarios = unique("scenario", results.filter((r) => r.file === result.file));
  const columns = unique("preset", results.filter((r) => r.file === result.file));
  fill(section, {}, [
    h("h2", {}, "Presets compared"),
    h("p", { class: "note" }, `The same prompts (${result.file}, scenario ${result.scenario}), matched in other ways.` +
      (bound !== undefined ? " The mark is the bound: every run of 32 tokens seen before." : "")),
    h("ul", { class: "rows" }, same.map((r) => row(r.preset, bar(r, { bound: r.bound }),
      [h("b", {}, pct(r.content, r.tokens)), r.bound ? ` beyond, ${pct(r.content, r.bound)} of bound` : " beyond", `, ${per(r)} segments`]))),
    legend(bound !== undefined),
    scenarios.length > 1 && h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Presets by scenario" }, h("table", {},
      h("caption", { class: "hidden" }, "Share reused beyond the exact prefix"),
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "% reused beyond"), h("th", { scope: "col" }, "exact prefix"),
        columns.map((p) => h("th", { scope: "col" }, p)), bound !== undefined && h("th", { scope: "col" }, "bound"))),
      h("tbody", {}, scenarios.map((scenario) => {
        const line = columns.map((preset) => find({ file: result.file, scenario, preset }));
        const any = line.find(Boolean);
        const limit = line.find((r) => r && r.bound !== null);
        const cell = (x, all, small) => h("td", {}, (100 * share(x, all)).toFixed(1), small && h("small", {}, ` (${small})`));
        return h("tr", {}, h("th", { scope: "row" }, scenario), cell(any.exact, any.tokens),
          line.map((r) => (r ? cell(r.content, r.tokens, per(r)) : h("td", {}, "–"))),
          bound !== undefined && (limit ? cell(limit.bound, limit.tokens) : h("td", {}, "–")));
      })))),
    scenarios.length > 1 && h("p", { class: "note" }, "In brackets: segments per prompt."),
  ]);
}

function capacity(section, result) {
  fill(section, {}, [
    h("h2", {}, "How large a cache is worth it"),
    h("p", { class: "note" }, "The same replay with eviction: what remains when the cache holds only so many tokens."),
    h("ul", { class: "rows" }, result.capacities.map(([size, exact, content, computed]) => {
      const sums = { tokens: exact + content + computed, exact, content, computed };
      return row(counted(size, "token"), bar(sums), [h("b", {}, pct(exact + content, sums.tokens)), ` reused, ${pct(content, sums.tokens)} beyond the prefix`]);
    })),
    legend(false),
  ]);
}

function problems(section) {
  const total = data.problems.reduce((sum, p) => sum + p.count, 0);
  fill(section, {}, [
    h("h2", {}, `${counted(total, "remark")} on lines`),
    h("p", { class: "note" }, "Lines that were left out, or read with a reservation; all figures are of what was read."),
    data.problems.map((p) => h("details", { open: total <= 10 ? "" : null }, h("summary", {}, `${p.file}: ${num(p.count)}`),
      h("ol", { class: "problems" }, p.lines.map((line) => h("li", {}, line))),
      p.lines.length < p.count && h("p", { class: "note" }, `The first ${num(p.lines.length)} of ${num(p.count)}.`))),
  ]);
}

function footer() {
  const speed = results.reduce((sum, r) => sum + r.tokens, 0) / results.reduce((sum, r) => sum + r.seconds, 0);
  const terms = [
    ["Exact prefix", "The longest run from the first token on that some earlier prompt, of any session, began with."],
    ["Reused beyond it", "Tokens in runs that an earlier prompt also held, perhaps at another position; every token of a run was compared."],
    ["Computed", "All others: their keys and values come from a forward pass."],
    ["δ", "Position in this prompt minus position in the prompt that a run is taken from; 0 means it did not move."],
    ["Preset", "How prompts are cut and matched; as with irminsul serve --preset."],
    ["Scenario", "How prompts were changed before the replay; asis means not at all."],
  ];
  return h("footer", {}, h("h3", {}, "Words"), h("dl", {}, terms.map(([name, words]) => [h("dt", {}, name), h("dd", {}, words)])),
    h("p", {}, `Made by irminsul ${data.version} from a replay without a model` +
      (Number.isFinite(speed) ? `, at ${short(Math.round(speed))} tokens per second` : "") + ". " +
      (data.text ? "This file holds prompt text and session ids: share it accordingly. " : "This file holds no prompt text; sessions are numbered in replay order. ") +
      "It loads nothing from elsewhere."));
}

function draw() {
  const result = current();
  hideTip();
  page.style.minHeight = page.offsetHeight + "px"; // keeps the scroll position while the sections are replaced
  page.replaceChildren();
  const tools = choices();
  if (tools) page.append(tools);
  const lead = part("summary");
  lead.className = "lead";
  summary(lead);
  if (unique("file").length > 1) {
    page.append(h("h2", { class: "file" }, result.file, h("span", {}, ` ${counted(result.prompts, "prompt")}, scenario ${result.scenario}, preset ${result.preset}`)));
  }
  timeline(part("time"), result);
  promptMap(part("prompt"), result);
  if (result.causes.length) causes(part("causes"), result);
  if (results.some((r) => r !== result && r.file === result.file)) presets(part("presets"), result);
  if (result.capacities.length) capacity(part("capacity"), result);
  if (data.problems.length) problems(part("problems"));
  page.append(footer());
  page.style.minHeight = "";
}

document.body.append(hatch(), tip, spoken);
draw();
let drawn = page.clientWidth;
window.addEventListener("resize", () => {
  if (page.clientWidth === drawn) return;
  drawn = page.clientWidth;
  draw();
});
document.body.dataset.ready = "yes";

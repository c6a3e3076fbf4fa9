"use strict";
// What the page is built from: elements, numbers, bars and the two drawings. Text goes in as text nodes only.

const NS = "http://www.w3.org/2000/svg";
const SOURCES = [
  ["exact", "exact prefix"],
  ["content", "reused beyond it"],
  ["computed", "computed"],
];
const SHIFTS = [
  ["m3", "δ ≤ −1,024"], ["m2", "−1,023 to −64"], ["m1", "−63 to −1"], ["z", "0"],
  ["p1", "1 to 63"], ["p2", "64 to 1,023"], ["p3", "δ ≥ 1,024"],
];

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return node;
}
const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) => fill(document.createElementNS(NS, tag), attributes, children);

const format = new Intl.NumberFormat("en-US");
const num = (x) => format.format(x).replace("-", "−");
const share = (part, all) => (all ? part / all : 0);
const pct = (part, all) => (100 * share(part, all)).toFixed(1) + "\u00a0%";
const signed = (x) => (x > 0 ? "+" : "") + num(x);
const counted = (n, one, many) => `${num(n)} ${n === 1 ? one : many || one + "s"}`;
const short = (x) => (x >= 1e6 ? +(x / 1e6).toPrecision(3) + "M" : x >= 1e4 ? +(x / 1e3).toPrecision(3) + "k" : num(x));

function shiftClass(delta) {
  const size = Math.abs(delta);
  return delta === 0 ? "z" : (delta < 0 ? "m" : "p") + (size < 64 ? 1 : size < 1024 ? 2 : 3);
}

/** The smallest of 1, 2, 2.5, 5 times a power of ten that is at least x. */
function nice(x) {
  const power = 10 ** Math.floor(Math.log10(Math.max(x, 1)));
  return [1, 2, 2.5, 5, 10].map((f) => f * power).find((y) => y >= x && Number.isInteger(y)) || 10 * power;
}

/** Round steps from 0 up to `most`, about `count` of them. */
function ticks(most, count) {
  const step = nice(most / Math.max(count, 1));
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, i) => i * step);
}

function hatch() {
  return s("svg", { width: 0, height: 0, "aria-hidden": "true", style: "position:absolute" },
    s("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      s("rect", { width: 6, height: 6, style: "fill:var(--computed)" }),
      s("rect", { width: 1.5, height: 6, style: "fill:var(--hatch)" })));
}

function legend(withBound) {
  return h("ul", { class: "legend" },
    SOURCES.map(([name, words]) => h("li", {}, h("i", { class: name }), words)),
    withBound && h("li", {}, h("i", { class: "bound" }), "most that any matcher could reuse"));
}

/** A stacked bar of {tokens, exact, content, computed}; `bound` marks tokens beyond the exact prefix. */
function bar(sums, { bound = null, big = false } = {}) {
  const words = SOURCES.map(([name, text]) => `${pct(sums[name], sums.tokens)} ${text}`).join(", ");
  const parts = SOURCES.filter(([name]) => sums[name] > 0);
  return h("div", { class: "bar chart" + (big ? " big" : ""), role: "img", "aria-label": words, title: words },
    parts.map(([name]) => h("i", { class: name, style: `width:${100 * share(sums[name], sums.tokens)}%` })),
    bound !== null && h("u", { style: `left:${100 * share(sums.exact + bound, sums.tokens)}%` }));
}

// The tooltip, and the same words for screen readers.
const tip = h("div", { id: "tip", hidden: "" });
const spoken = h("p", { class: "hidden", "aria-live": "polite" });
function showTip(x, y, lines) {
  tip.replaceChildren(...lines.map((line) => h("p", {}, line)));
  tip.hidden = false;
  tip.style.left = 0; // else its width is that which was left beside the old place
  const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
  tip.style.left = Math.max(8, Math.min(x + 14, room)) + window.scrollX + "px";
  const below = y + 18 + tip.offsetHeight < window.innerHeight;
  tip.style.top = (below ? y + 18 : Math.max(4, y - 14 - tip.offsetHeight)) + window.scrollY + "px";
}
function hideTip() {
  tip.hidden = true;
}

/**
 * Let a drawing be read by mouse and keyboard. `find(x, y)` gives the index at a point of the drawing (or -1),
 * `box(i)` its [x, y, width, height], `lines(i)` its words; `pick(i)` is called on click and Enter.
 */
function explore(svg, count, { find, box, lines, pick }) {
  const cursor = svg.appendChild(s("rect", { class: "cursor", visibility: "hidden" }));
  let at = -1;
  const leave = () => {
    at = -1;
    cursor.setAttribute("visibility", "hidden");
    hideTip();
  };
  const go = (i, x, y) => {
    if (i < 0) return leave();
    at = i;
    const [left, top, width, height] = box(i);
    fill(cursor, { x: left, y: top, width: Math.max(width, 1), height, visibility: "visible" }, []);
    const origin = svg.getBoundingClientRect();
    showTip(x === undefined ? origin.left + left + width / 2 : x, y === undefined ? origin.top + top + height : y, lines(i));
  };
  const point = (event) => {
    const origin = svg.getBoundingClientRect();
    return find(event.clientX - origin.left, event.clientY - origin.top);
  };
  svg.addEventListener("pointermove", (event) => go(point(event), event.clientX, event.clientY));
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("click", (event) => {
    const i = point(event);
    go(i, event.clientX, event.clientY);
    if (i >= 0 && pick) pick(i);
  });
  svg.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: count - 1 };
    if (event.key === "Escape") return leave();
    if ((event.key === "Enter" || event.key === " ") && at >= 0 && pick) pick(at);
    else if (event.key in steps && count) {
      go(Math.max(0, Math.min(count - 1, steps[event.key])));
      spoken.textContent = lines(at).join(". ");
    } else return;
    event.preventDefault();
  });
}

/** Stacked columns, one per bin of prompts in replay order. `whole`: shares of 100 %, else tokens per prompt. */
function drawTimeline(width, result, whole, pick) {
  const bins = result.bins;
  const [left, top, bottom] = [46, 8, 40];
  const [inner, height] = [width - left - 2, width < 600 ? 200 : 260];
  const starts = bins.reduce((list, b) => [...list, list[list.length - 1] + b[0]], [0]);
  const highest = Math.max(...bins.map((b) => b[1] / b[0]), 1);
  const most = whole ? 1 : Math.ceil(highest / nice(highest / 4)) * nice(highest / 4);
  const x = (k) => left + (inner * starts[k]) / result.prompts;
  const gap = inner / bins.length > 6 ? 1 : 0;
  const paths = { exact: "", content: "", computed: "" };
  bins.forEach(([prompts, tokens, ...parts], i) => {
    let y = top + height;
    SOURCES.forEach(([name], k) => {
      const tall = (height * (whole ? share(parts[k], tokens) : parts[k] / prompts)) / most;
      if (tall > 0) paths[name] += `M${x(i).toFixed(2)} ${y.toFixed(2)}V${(y - tall).toFixed(2)}H${(x(i + 1) - gap).toFixed(2)}V${y.toFixed(2)}z`;
      y -= tall;
    });
  });
  const levels = whole ? [0, 0.25, 0.5, 0.75, 1] : ticks(most, 4);
  const mean = pct(result.exact, result.tokens);
  const svg = s("svg", { width, height: top + height + bottom, tabindex: 0, role: "group", id: "timeline", "aria-label":
    `Share of tokens by source, ${bins.length} columns in replay order; on average ${mean} exact prefix, ` +
    `${pct(result.content, result.tokens)} reused beyond it. Arrow keys read the columns, Enter opens a prompt.` },
    levels.map((v) => {
      const y = Math.round(top + height * (1 - v / most)) + 0.5;
      return [s("line", { class: "axis", x1: left, x2: width, y1: y, y2: y }),
        s("text", { x: left - 8, y: y + 4, "text-anchor": "end" }, whole ? 100 * v + "\u00a0%" : short(v))];
    }),
    SOURCES.map(([name]) => s("path", { class: `sharp ${name}`, d: paths[name] || "M0 0" })),
    ticks(result.prompts, Math.max(2, Math.floor(width / 130))).map((k) => s("text", {
      x: Math.max(left, Math.min(left + (inner * k) / result.prompts, width - 18)), y: top + height + 16, "text-anchor": k ? "middle" : "start",
    }, num(k))),
    s("text", { x: left + inner / 2, y: top + height + 34, "text-anchor": "middle" },
      "prompts in replay order" + (bins[0][0] > 1 ? `, ${num(bins[0][0])} a column` : "")));
  explore(svg, bins.length, {
    find: (px) => (px < left ? -1 : bins.findIndex((_, i) => px < x(i + 1))),
    box: (i) => [x(i), top, x(i + 1) - x(i), height],
    lines: (i) => [
      bins[i][0] > 1 ? `Prompts ${num(starts[i] + 1)} to ${num(starts[i + 1])}` : `Prompt ${num(starts[i] + 1)}`,
      counted(bins[i][1], "token"),
      ...SOURCES.map(([, words], k) => `${pct(bins[i][k + 2], bins[i][1])} ${words} (${num(bins[i][k + 2])})`),
    ],
    pick: (i) => pick(starts[i], starts[i + 1]),
  });
  return svg;
}

/** A prompt as consecutive pieces {start, length, kind, delta}: its segments and what is computed between them. */
function pieces(prompt) {
  const list = [];
  let at = 0;
  const computed = (until) => until > at && list.push({ start: at, length: until - at, kind: "computed", delta: 0 });
  for (let i = 0; i < prompt.segments.length; i += 4) {
    const [start, length, delta, exact] = prompt.segments.slice(i, i + 4);
    computed(start);
    list.push({ start, length, delta, kind: exact ? "exact" : "content" });
    at = start + length;
  }
  computed(prompt.tokens);
  return list;
}
const pieceClass = (p) => (p.kind === "content" ? shiftClass(p.delta) : p.kind);
const range = (start, length) => `${num(start)} to ${num(start + length - 1)}`;
function pieceLines(p) {
  const donor = `from position ${range(p.start - p.delta, p.length)} of an earlier prompt`;
  const way = p.delta < 0 ? "nearer the start" : "farther from the start";
  return [
    { exact: "Exact prefix", content: "Reused beyond the prefix", computed: "Computed" }[p.kind],
    `position ${range(p.start, p.length)}, ${counted(p.length, "token")}`,
    ...(p.kind === "content" ? [`δ ${signed(p.delta)}: ${p.delta ? `${counted(Math.abs(p.delta), "token")} ${way} than there` : "same position as there"}`, donor] : []),
  ];
}

/** Ribbons from where the reused tokens stood (above) to where they stand now (below). */
function drawRibbons(width, prompt, list) {
  const moved = list.filter((p) => p.kind !== "computed");
  const most = Math.max(prompt.tokens, ...moved.map((p) => p.start - p.delta + p.length), 1);
  const [top, bottom, thick] = [18, 104, 9];
  const x = (t) => ((width * t) / most).toFixed(2);
  const wide = (p) => Math.max((width * p.length) / most, 0.75).toFixed(2);
  return s("svg", { width, height: bottom + thick + 18, role: "img", id: "ribbons",
    "aria-label": "Where reused tokens stood in earlier prompts, and where they stand in this one; the table below has the numbers" },
    s("text", { x: 0, y: 11 }, "where it stood in earlier prompts"),
    s("text", { x: 0, y: bottom + thick + 14 }, "where it stands in this prompt"),
    s("rect", { class: "sharp computed", x: 0, y: bottom, width: x(prompt.tokens), height: thick }),
    moved.map((p) => {
      const [a, b] = [p.start - p.delta, p.start];
      return [
        s("path", { class: `band ${pieceClass(p)}`, d: `M${x(a)} ${top + thick}H${x(a + p.length)}L${x(b + p.length)} ${bottom}H${x(b)}z` }),
        s("rect", { class: `sharp ${pieceClass(p)}`, x: x(a), y: top, width: wide(p), height: thick }),
        s("rect", { class: `sharp ${pieceClass(p)}`, x: x(b), y: bottom, width: wide(p), height: thick }),
      ];
    }));
}

/** The prompt from its first token to its last, wrapped into rows like text. */
function drawMap(width, prompt, list) {
  const left = 58;
  const inner = width - left - 2;
  const rows = Math.max(1, Math.min(14, Math.ceil(prompt.tokens / (inner * 1.5))));
  const perRow = rows === 1 ? Math.max(prompt.tokens, 1) : nice(prompt.tokens / rows);
  const count = Math.max(1, Math.ceil(prompt.tokens / perRow));
  const [tall, pitch] = [24, 31];
  const x = (t) => left + (inner * t) / perRow;
  const runs = [];
  list.forEach((p, i) => {
    for (let row = Math.floor(p.start / perRow); row * perRow < p.start + p.length; row++) {
      const from = Math.max(p.start, row * perRow);
      const to = Math.min(p.start + p.length, (row + 1) * perRow);
      runs.push({ i, row, from: from - row * perRow, to: to - row * perRow });
    }
  });
  const gap = (r) => (x(r.to) - x(r.from) > 5 ? 1 : 0);
  const label = (p) => ({ exact: "exact prefix", content: "δ " + signed(p.delta), computed: "" }[p.kind]);
  const svg = s("svg", { width, height: count * pitch, tabindex: 0, role: "group", id: "map",
    "aria-label": `Segment map, ${counted(list.length, "piece")}. Arrow keys read them one by one.` },
    Array.from({ length: count }, (_, row) => s("text", { x: left - 8, y: row * pitch + 16, "text-anchor": "end" }, num(row * perRow))),
    runs.map((r) => {
      const p = list[r.i];
      const wide = x(r.to) - x(r.from);
      const words = label(p);
      return [
        s("rect", { class: `sharp ${pieceClass(p)}`, x: x(r.from).toFixed(2), y: r.row * pitch, width: Math.max(wide - gap(r), 0.75).toFixed(2), height: tall }),
        words && wide > 7 * words.length + 10 && s("text", { class: `in ${pieceClass(p)}`, x: x(r.from) + 6, y: r.row * pitch + 16 }, words),
      ];
    }),
    prompt.breaks.map(([position]) => {
      const row = Math.min(Math.floor(position / perRow), count - 1);
      return s("path", { class: "stop", d: `M${x(position - row * perRow)} ${row * pitch - 3}v${tall + 6}` });
    }));
  const first = list.map((_, i) => runs.find((r) => r.i === i));
  explore(svg, list.length, {
    find: (px, py) => {
      const row = Math.floor(py / pitch);
      const hit = py - row * pitch <= tall && runs.find((r) => r.row === row && px >= x(r.from) && px < x(r.to));
      return hit ? hit.i : -1;
    },
    box: (i) => [x(first[i].from), first[i].row * pitch, x(first[i].to) - x(first[i].from), tall],
    lines: (i) => pieceLines(list[i]),
  });
  return svg;
}

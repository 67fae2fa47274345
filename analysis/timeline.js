// The page of a run's timeline, behind blocks.js: draws the part of the picture that is chosen, and sums it up.
// Times are in milliseconds since the first event that is on the page.

const SVG = "http://www.w3.org/2000/svg", LEFT = 190, WIDTH = 1046, ROW = 20, GAP = 10, TOP = 26;
const SHORTEST = 1, LAST_SHOWN = 20, FEWEST_PIXELS = 0.7;
const COLOURS = {
  rollout: 5, reward: 7, forward: 1, completions: 6, advantage: 4, update: 0, weight_sync: 2, evaluate: 3, save: 8,
  probes: 7, samples: 6, prefill: 1, asked: 1,
};
const WAITING = "waiting for rank ";
let index, events, lanes, ranks, folded, end, shown, numDrawn = 0, numHidden = 0;

const isEngine = lane => lane >= index.fixed;
const isWait = at => index.names[events.name[at]].startsWith(WAITING);
const stop = at => events.start[at] + events.length[at];
const seconds = ms => ms >= 100000 ? Math.round(ms / 1000).toLocaleString("en") + " s" : (ms / 1000).toPrecision(3) + " s";
const count = number => number.toLocaleString("en");

function shape(element, attributes, ...children) {
  const made = document.createElementNS(SVG, element);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function colourOf(at) {
  const lane = index.lanes[events.lane[at]], name = index.names[events.name[at]];
  if (lane === "drawing" || lane === "iteration") return events.iteration[at] % 2 ? 1 : 6;
  if (lane === "delivery") return 2;
  if (isWait(at)) return 8;
  return COLOURS[name] === undefined ? 5 : COLOURS[name];
}

function words(at) {
  const lane = index.lanes[events.lane[at]], node = index.nodes[events.node[at]];
  const lines = [`${lane}${node ? " at " + node : ""}: ${index.names[events.name[at]]}`, `iteration ${events.iteration[at]}`];
  if (events.length[at]) lines.push(seconds(events.length[at]));
  if (events.busy[at]) lines.push(`busy ${seconds(1000 * events.busy[at])}`);
  for (const name of ["requests", "samples", "tokens", "engines"]) {
    if (events[name][at]) lines.push(`${count(events[name][at])} ${name}`);
  }
  return lines.join("\n");
}

// --- the picture -------------------------------------------------------------------------------------------

const place = time => LEFT + (time - shown[0]) / (shown[1] - shown[0]) * (WIDTH - LEFT);
const timeAt = across => shown[0] + (across - LEFT) / (WIDTH - LEFT) * (shown[1] - shown[0]);

function heights() {
  const rows = lanes.map((_, lane) => folded.has(lane) ? 0 : 1);
  for (let at = 0; at < events.lane.length; at++) {
    if (!folded.has(events.lane[at])) rows[events.lane[at]] = Math.max(rows[events.lane[at]], events.row[at] + 1);
  }
  let top = TOP;
  return lanes.map((_, lane) => {
    const own = top;
    if (rows[lane]) top += rows[lane] * ROW + GAP;
    return [own, top];
  });
}

function moment(at, top) {
  const x = place(events.start[at]), title = shape("title", {}, words(at));
  if (index.names[events.name[at]] === "lost") {
    return shape("path", { class: "lost", d: `M${x - 5} ${top + 4}l10 11m-10 0l10-11` }, title);
  }
  return shape("path", { class: "back", d: `M${x} ${top + 3}l6 12h-12z` }, title);
}

function box(at, top) {
  const left = Math.max(place(events.start[at]), LEFT), right = Math.min(place(stop(at)), WIDTH);
  const knowsBusy = isEngine(events.lane[at]) || events.busy[at] > 0;
  const isQuiet = isWait(at) || (knowsBusy && events.busy[at] * 1000 < events.length[at] / 2);
  const made = [shape("rect", {
    class: `box f${colourOf(at)}${isQuiet ? " quiet" : ""}`, x: left.toFixed(1), y: top, rx: 2,
    width: Math.max(right - left, SHORTEST).toFixed(1), height: ROW - 3,
  }, shape("title", {}, words(at)))];
  const name = index.names[events.name[at]];
  if (right - left > 7 * name.length + 6) made.push(shape("text", { class: isQuiet ? "word dark" : "word", x: left + 4, y: top + 13 }, name));
  return made;
}

function ticks(bottom) {
  const span = (shown[1] - shown[0]) / 1000, rough = span / 8, unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find(base => base * unit >= rough) * unit, made = [];
  for (let at = Math.ceil(shown[0] / 1000 / step) * step; at * 1000 <= shown[1]; at += step) {
    const x = place(at * 1000);
    made.push(shape("line", { class: "grid", x1: x, x2: x, y1: TOP - 6, y2: bottom }));
    made.push(shape("text", { class: "tick mid", x, y: TOP - 11 }, `${Number(at.toPrecision(6)).toLocaleString("en")} s`));
  }
  return made;
}

function draw() {
  const tops = heights(), bottom = tops[tops.length - 1][1];
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${bottom + 4}`, class: "chart broad", role: "img", "aria-label": "timeline" });
  svg.append(...ticks(bottom));
  const nodes = nodesShown();
  lanes.forEach((name, lane) => {
    if (folded.has(lane)) return;
    svg.append(shape("text", { class: "lane", x: 0, y: tops[lane][0] + 13 }, name.length > 28 ? "…" + name.slice(-27) : name));
    const node = nodes[lane];
    if (node) svg.append(shape("text", { class: "node", x: 0, y: tops[lane][0] + 25 }, "at " + node));
  });
  const drawnTo = new Map(), marks = [];
  numDrawn = numHidden = 0;
  for (let at = 0; at < events.lane.length; at++) {
    if (stop(at) < shown[0] || events.start[at] > shown[1] || folded.has(events.lane[at])) continue;
    const lane = events.lane[at], top = tops[lane][0] + events.row[at] * ROW, key = lane * 16 + events.row[at];
    if (!events.length[at]) {
      marks.push(moment(at, top));
      continue;
    }
    const right = place(stop(at));
    if (right - (drawnTo.has(key) ? drawnTo.get(key) : -1e9) < FEWEST_PIXELS) {
      numHidden++;
      continue;
    }
    drawnTo.set(key, Math.max(right, place(events.start[at]) + SHORTEST));
    numDrawn++;
    svg.append(...box(at, top));
  }
  for (const [at, iteration, pause] of index.breaks) {
    if (at < shown[0] || at > shown[1]) continue;
    const title = `started again after iteration ${iteration}, ${seconds(1000 * pause)} after the program before had ended`;
    marks.push(shape("line", { class: "break", x1: place(at), x2: place(at), y1: TOP - 6, y2: bottom }, shape("title", {}, title)));
  }
  svg.append(...marks);
  byId("picture").replaceChildren(svg);
  listenTo(svg, bottom);
  say();
  sumUp();
}

// Where the engine or rank of each lane is by the end of what is shown.
function nodesShown() {
  const nodes = lanes.map(() => "");
  for (let at = 0; at < events.lane.length && events.start[at] <= shown[1]; at++) {
    const lane = events.lane[at];
    if (isEngine(lane) || ranks.has(lane)) nodes[lane] = index.nodes[events.node[at]] || nodes[lane];
  }
  return nodes;
}

function listenTo(svg, bottom) {
  const across = event => (event.clientX - svg.getBoundingClientRect().left) / svg.getBoundingClientRect().width * WIDTH;
  const inside = x => Math.min(Math.max(x, LEFT), WIDTH);
  let from = null, chosen = null;
  svg.addEventListener("pointerdown", event => {
    if (across(event) < LEFT) return;
    from = across(event);
    chosen = shape("rect", { class: "chosen", y: TOP - 6, height: bottom - TOP + 6, x: from, width: 0 });
    svg.append(chosen);
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", event => {
    if (from === null) return;
    const to = inside(across(event));
    chosen.setAttribute("x", Math.min(from, to));
    chosen.setAttribute("width", Math.abs(to - from));
  });
  svg.addEventListener("pointerup", event => {
    if (from === null) return;
    const to = inside(across(event)), [left, right] = [Math.min(from, to), Math.max(from, to)];
    from = null;
    chosen.remove();
    if (right - left > 4) look(timeAt(left), timeAt(right));
  });
}

function say() {
  const [first, last] = iterationsShown();
  byId("from").value = first;
  byId("to").value = last;
  const hidden = numHidden ? `; ${count(numHidden)} are too short to be drawn, come closer to see them` : "";
  byId("status").textContent = `iterations ${first} to ${last}: ${seconds(shown[1] - shown[0])}, ${count(numDrawn)} events${hidden}`;
}

// --- what is shown -----------------------------------------------------------------------------------------

// Of each iteration, in order: [number, begin, end]; its end is the beginning of the next.
function iterations() {
  const lane = index.lanes.indexOf("iteration"), found = [];
  for (let at = 0; at < events.lane.length; at++) {
    if (events.lane[at] === lane) found.push([events.iteration[at], events.start[at], stop(at)]);
  }
  return found.map(([number, begin, own], at) => [number, begin, Math.max(own, at + 1 < found.length ? found[at + 1][1] : end)]);
}

function iterationsShown() {
  const found = iterations().filter(one => one[2] > shown[0] + 1 && one[1] < shown[1] - 1);
  return found.length ? [found[0][0], found[found.length - 1][0]] : [0, 0];
}

function look(begin, close) {
  const length = Math.min(Math.max(close - begin, 1), end);
  const from = Math.min(Math.max(begin, 0), end - length);
  shown = [from, from + length];
  putIntoAddress({ t: shown.map(time => time.toFixed(0)) }, {});
  draw();
}

function lookAtIterations(first, last) {
  const all = iterations(), found = all.filter(one => one[0] >= first && one[0] <= last);
  if (!found.length) return draw();
  const begin = first < all[0][0] ? 0 : found[0][1];
  look(begin, found[found.length - 1][2]);
}

function move(share, zoom) {
  const length = shown[1] - shown[0], middle = (shown[0] + shown[1]) / 2 + share * length;
  look(middle - length * zoom / 2, middle + length * zoom / 2);
}

// --- sums --------------------------------------------------------------------------------------------------

function sumUp() {
  const sums = new Map(), span = shown[1] - shown[0];
  for (let at = 0; at < events.lane.length; at++) {
    const own = Math.min(stop(at), shown[1]) - Math.max(events.start[at], shown[0]);
    const lane = events.lane[at], name = index.lanes[lane];
    if (own < 0 || name === "iteration" || folded.has(lane) || (own === 0 && events.length[at])) continue;
    const isNamed = isEngine(lane) || ranks.has(lane) || name === "learner", what = index.names[events.name[at]];
    const key = isNamed ? `${name}: ${what}` : name;
    const sum = sums.get(key) || { lane, order: isEngine(lane) ? 0 : -1, ms: 0, busy: 0, num: 0, requests: 0, samples: 0, tokens: 0 };
    sum.ms += own;
    if (events.length[at]) sum.busy += events.busy[at] * own / events.length[at];
    sum.num++;
    if (stop(at) <= shown[1] && stop(at) > shown[0]) {
      for (const column of ["requests", "samples", "tokens"]) sum[column] += events[column][at];
    }
    sums.set(key, sum);
  }
  const rows = [...sums].sort((one, other) => one[1].lane - other[1].lane || other[1].ms - one[1].ms);
  const head = ["who: what", "seconds", "% of the time", "busy", "times", "requests", "samples", "tokens"];
  const table = make("table", "", make("thead", "", make("tr", "", ...head.map(text => make("th", "", text)))));
  const body = make("tbody", "");
  for (const [key, sum] of rows) {
    const cells = [seconds(sum.ms), (100 * sum.ms / span).toFixed(1), sum.busy ? seconds(1000 * sum.busy) : "–", count(sum.num)];
    for (const column of ["requests", "samples", "tokens"]) cells.push(sum[column] ? count(sum[column]) : "–");
    body.append(make("tr", "", make("th", "", key), ...cells.map(text => make("td", "", text))));
  }
  table.append(body);
  byId("sums").replaceChildren(table, make("p", "note", "Requests, samples and tokens are of what ended in this part. "
    + "Batches that are drawn at the same time are added up."));
}

// --- the page ----------------------------------------------------------------------------------------------

function keys() {
  const found = [...new Set(index.names)].filter(name => name in COLOURS).map(name => [`f${COLOURS[name]}`, name]);
  if (index.names.some(name => name.startsWith(WAITING))) found.push(["f8 quiet", "waiting for another rank"]);
  byId("legend").append(...found.map(([colour, name]) => make("span", "", make("i", `square ${colour}`), " " + name)));
}

openPage(async () => {
  index = await unpack("index");
  if (!index.events) return;
  events = index.events;
  lanes = index.lanes;
  ranks = new Set(index.ranks);
  folded = new Set(index.folded);
  end = 1;
  for (let at = 0; at < events.lane.length; at++) end = Math.max(end, stop(at));
  keys();
  const range = () => lookAtIterations(Number(byId("from").value), Number(byId("to").value));
  whenTyped(byId("from"), range);
  whenTyped(byId("to"), range);
  for (const [name, share, zoom] of [["earlier", -0.5, 1], ["later", 0.5, 1], ["in", 0, 0.5], ["out", 0, 2]]) {
    byId(name).addEventListener("click", () => move(share, zoom));
  }
  byId("all").addEventListener("click", () => look(0, end));
  if (index.folded.length) {
    byId("ranks").addEventListener("click", event => {
      const isOpen = folded.size > 0;
      folded = new Set(isOpen ? [] : index.folded);
      event.target.setAttribute("aria-pressed", isOpen);
      draw();
    });
  }
  const known = (new URLSearchParams(location.hash.slice(1)).get("t") || "").split(",").map(Number);
  if (known.length === 2 && known[1] > known[0]) return look(known[0], known[1]);
  const all = iterations(), first = all[Math.max(0, all.length - LAST_SHOWN)];
  if (first) look(all.length > LAST_SHOWN ? first[1] : 0, end);
  else look(0, end);
}, "the timeline");

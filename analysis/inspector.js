// The inspector, behind blocks.js: finds, filters and sorts by the index, opens trajectories.

const PAGE = 50;
const SORTS = {
  file: ["order of the file", null],
  suspicious: ["most suspicions", at => -bits(index.kinds[at])],
  chance: ["least possible", at => index.chance[at]],
  jump: ["largest jump of value", at => -index.jump[at]],
  width: ["widest interval", at => -index.width[at]],
  prm: ["PRM furthest from label", at => -index.prm[at]],
  judge: ["judge furthest from label", at => -index.judge[at]],
  longest: ["longest", at => -index.length[at]],
  shortest: ["shortest", at => index.length[at]],
  steps: ["most steps", at => -index.steps[at]],
};
let index, kinds, found = [], shown = PAGE, searches = 0;
let choice = { q: "", in: "ids", kinds: [], right: "", sort: "file", t: "" };

const bits = mask => { let count = 0; for (; mask; mask &= mask - 1) count++; return count; };
// --- one trajectory ----------------------------------------------------------------------------------------

function completionList(rows) {
  if (!rows.length) return make("p", "completions muted", "completions left out: the page would be too large");
  const box = make("details", "completions"), right = rows.filter(row => row[0]).length;
  box.append(make("summary", "", `${rows.length} completions shown, ${right} right`));
  box.addEventListener("toggle", () => {
    if (!box.open || box.children.length > 1) return;
    for (const [isRight, text, answer, finish] of rows) {
      const summary = (answer === null ? "no answer" : "answer " + answer) + (finish === "stop" ? "" : ", " + finish);
      box.append(make("div", "completion", badge(isRight), make("span", "muted", summary), make("div", "step", text)));
    }
  });
  return box;
}

function valueCell(value, low, high, right, total, isLast) {
  const cell = make("td", "value-cell");
  if (value === null) return cell.append("–"), cell;
  const bar = make("div", "meter"), span = make("div", "span " + colour(value)), mark = make("div", "point " + colour(value));
  span.style.left = 100 * low + "%";
  span.style.width = 100 * (high - low) + "%";
  mark.style.left = 100 * value + "%";
  bar.append(span, mark);
  const counts = isLast ? "outcome" : `[${show(low)}, ${show(high)}]` + (total ? ` ${right}/${total}` : "");
  cell.append(make("b", "", show(value)), bar, make("span", "limits", counts));
  return cell;
}

function numberCell(value, target, weight) {
  const cell = make("td", "number-cell"), isFar = value !== null && target !== null && Math.abs(value - target) >= 0.5;
  cell.append(make("span", isFar ? "far" : "", show(value)));
  if (weight !== null && value !== null && weight < 1) cell.append(make("span", "limits", "weight " + show(weight)));
  return cell;
}

function stepRow(line, number, isLast, states, has) {
  const [text, value, low, high, right, total, label, weight, score, verdict, state] = line;
  const written = make("td", "", make("span", "step", text === "" ? "(empty)" : text));
  if (state !== null) written.append(completionList(states[state]));
  const target = label === null ? value : label;
  const row = make("tr", "", make("th", "", String(number)), written, valueCell(value, low, high, right, total, isLast));
  row.append(numberCell(label, null, weight));
  if (has.prm) row.append(numberCell(score, target, null));
  if (has.judge) row.append(numberCell(verdict, target, null));
  return row;
}

function detail(row, states) {
  const box = make("div", "detail");
  const facts = make("p", "muted", "gold ", make("code", "", row.gold), ", answer ",
    row.answer === null ? "none" : make("code", "", row.answer), `, ended by ${row.finish}, value of the prompt ${show(row.promptValue)}`);
  box.append(make("div", "prompt", row.prompt), facts);
  if (row.promptState !== null) box.append(completionList(states[row.promptState]));
  if (row.why.length) {
    box.append(make("ul", "why", ...row.why.map(([kind, , text]) => make("li", "", make("b", "", kinds[kind][1]), ": " + text))));
  }
  const has = { prm: row.steps.some(line => line[8] !== null), judge: row.steps.some(line => line[9] !== null) };
  const names = ["step", "", "value after it", "label", ...(has.prm ? ["PRM"] : []), ...(has.judge ? ["judge"] : [])];
  const head = make("thead", "", make("tr", "", ...names.map(name => make("th", "", name))));
  const body = make("tbody", "", ...row.steps.map((line, at) => stepRow(line, at + 1, at === row.steps.length - 1, states, has)));
  box.append(make("div", "scroll", make("table", "steps-table", head, body)));
  return box;
}

async function toggle(card, at) {
  const old = card.querySelector(".detail");
  if (old) {
    old.remove();
    card.querySelector("button").setAttribute("aria-expanded", "false");
    return;
  }
  const known = await block(index.block[at]);
  if (card.querySelector(".detail")) return;
  card.append(detail(known.rows[index.place[at]], known.states));
  card.querySelector("button").setAttribute("aria-expanded", "true");
}

function card(at) {
  const button = make("button", "head", badge(index.right[at]), make("code", "", index.id[at]));
  button.type = "button";
  button.setAttribute("aria-expanded", "false");
  button.append(make("span", "strip", ...index.values[at].map(value => make("i", colour(value)))));
  button.append(make("span", "muted", `${index.steps[at]} steps, ${index.length[at]} long`));
  kinds.forEach(([, name], kind) => {
    if (index.kinds[at] & (1 << kind)) button.append(make("span", "pill", name));
  });
  const box = make("article", "card trajectory", button);
  button.addEventListener("click", () => {
    choice.t = box.querySelector(".detail") ? "" : index.id[at];
    remember();
    toggle(box, at);
  });
  return box;
}

// --- finding -----------------------------------------------------------------------------------------------

async function textHolds(wanted, candidates, isCurrent) {
  const held = new Set(), byBlock = new Map();
  for (const at of candidates) byBlock.set(index.block[at], [...(byBlock.get(index.block[at]) || []), at]);
  const inCompletions = choice.in === "completions";
  let done = 0;
  for (const [number, places] of byBlock) {
    if (!isCurrent()) return null;
    byId("status").textContent = `searching, ${++done} of ${byBlock.size} blocks …`;
    const known = blocks.get(number) || await unpack("block-" + number);
    const holds = text => text.toLowerCase().includes(wanted);
    const states = inCompletions ? known.states.map(rows => rows.some(row => holds(row[1]))) : [];
    for (const at of places) {
      const row = known.rows[index.place[at]];
      const own = inCompletions ? row.steps.some(line => line[10] !== null && states[line[10]]) || states[row.promptState]
        : holds(row.prompt + "\n" + row.steps.map(line => line[0]).join(""));
      if (own) held.add(at);
    }
  }
  return held;
}

async function find() {
  const search = ++searches, wanted = choice.q.trim().toLowerCase();
  let mask = 0;
  for (const key of choice.kinds) mask |= 1 << kinds.findIndex(kind => kind[0] === key);
  let rows = [...index.id.keys()].filter(at =>
    (choice.right === "" || index.right[at] === Number(choice.right)) && (mask === 0 || (index.kinds[at] & mask) !== 0));
  if (wanted && choice.in === "ids") rows = rows.filter(at => index.id[at].toLowerCase().includes(wanted));
  else if (wanted) {
    const held = await textHolds(wanted, rows, () => search === searches);
    if (held === null) return;
    rows = rows.filter(at => held.has(at));
  }
  const key = (SORTS[choice.sort] || SORTS.file)[1];
  if (key) rows.sort((one, other) => key(one) - key(other) || one - other);
  found = rows;
  shown = PAGE;
  render();
}

function render() {
  const list = byId("list");
  list.replaceChildren(...found.slice(0, shown).map(card));
  byId("status").textContent = `${found.length.toLocaleString("en")} of ${index.id.length.toLocaleString("en")} trajectories`;
  byId("more").hidden = shown >= found.length;
  byId("more").textContent = `show ${Math.min(PAGE, found.length - shown)} more`;
}

function more() {
  const list = byId("list");
  list.append(...found.slice(shown, shown + PAGE).map(card));
  shown += PAGE;
  byId("more").hidden = shown >= found.length;
  byId("more").textContent = `show ${Math.min(PAGE, found.length - shown)} more`;
}

// --- what is chosen ----------------------------------------------------------------------------------------

function remember() {
  putIntoAddress(choice, { in: "ids", sort: "file" });
}

function recall() {
  const read = new URLSearchParams(location.hash.slice(1)), known = new Set(kinds.map(kind => kind[0]));
  choice = {
    q: read.get("q") || "", in: read.get("in") || "ids", right: read.get("right") || "", t: read.get("t") || "",
    sort: SORTS[read.get("sort")] ? read.get("sort") : "file",
    kinds: (read.get("kinds") || "").split(",").filter(key => known.has(key)),
  };
}

function putIntoControls() {
  byId("q").value = choice.q;
  for (const name of ["in", "right", "sort"]) byId(name).value = choice[name];
  for (const chip of document.querySelectorAll(".chip")) chip.setAttribute("aria-pressed", String(choice.kinds.includes(chip.value)));
}

async function arrive() {
  recall();
  const at = choice.t === "" ? -1 : index.id.indexOf(choice.t);
  putIntoControls();
  await find();
  if (at < 0) return;
  let box = [...byId("list").children][found.indexOf(at)];
  if (!box) byId("list").prepend(box = card(at));
  await toggle(box, at);
  box.scrollIntoView({ behavior: "instant" });
}

function controls() {
  for (const [key, [name]] of Object.entries(SORTS)) byId("sort").append(new Option(name, key));
  kinds.forEach(([key, name, meaning], kind) => {
    const count = index.kinds.filter(mask => mask & (1 << kind)).length;
    const chip = make("button", "chip", `${name} `, make("b", "", count.toLocaleString("en")));
    Object.assign(chip, { type: "button", value: key, title: meaning, disabled: count === 0 });
    chip.addEventListener("click", () => {
      choice.kinds = choice.kinds.includes(key) ? choice.kinds.filter(one => one !== key) : [...choice.kinds, key];
      chosen();
    });
    byId("chips").append(chip);
  });
  whenTyped(byId("q"), () => { choice.q = byId("q").value; chosen(); });
  for (const name of ["in", "right", "sort"]) {
    byId(name).addEventListener("change", () => { choice[name] = byId(name).value; chosen(); });
  }
  byId("more").addEventListener("click", more);
  addEventListener("hashchange", async () => {
    if (!location.hash.includes("=")) return;
    await arrive();
    if (choice.t === "") byId("trajectories").scrollIntoView({ behavior: "instant" });
  });
}

function chosen() {
  choice.t = "";
  putIntoControls();
  remember();
  find();
}

openPage(async () => {
  ({ index, kinds } = await unpack("index"));
  controls();
  await arrive();
}, "the trajectories");

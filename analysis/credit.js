// The page of step credit, behind blocks.js: lists groups of rollouts, colours their steps, sorts disagreements.

const PAGE = 20, ROWS = 20, EVERY = "*";
const SORTS = {
  iteration: ["iteration", null],
  disagreement: ["largest disagreement", at => -groups.worst[at]],
  even: ["closest to half right", at => Math.abs(groups.right[at] / groups.ids[at].length - 0.5)],
};
// of a row of `disagreements`: [group, place, step, one estimator, the other, its advantage, the other's]
const COLUMNS = [
  ["size", row => -Math.min(Math.abs(row[5]), Math.abs(row[6]))],
  ["iteration", row => groups.iteration[row[0]]],
  ["problem", row => groups.problem[row[0]]],
  ["rollout", row => groups.ids[row[0]][row[1]]],
  ["step", row => row[2]],
  ["advantages", row => -Math.abs(row[5] - row[6])],
];
const USUAL = { in: "ids", sort: "iteration", by: "advantage" };
let estimators, groups, disagreements, iterations, found = [], shown = PAGE, searches = 0;
let listed = [], rows = ROWS, column = 0;
let choice = {};

const signed = number => (number > 0 ? "+" : "") + show(number).replace("-", "−");
const compare = (one, other) => one < other ? -1 : one > other ? 1 : 0;

function level(value, scale) {
  const size = Math.min(3, Math.round(3 * Math.abs(value) / scale));
  return size === 0 ? "z" : (value < 0 ? "n" : "p") + size;
}

// --- one rollout -------------------------------------------------------------------------------------------

function square(rollout, number, step) {
  const [, name, scale] = estimators[number], isValue = choice.by === "value";
  const value = (isValue ? rollout.values : rollout.advantages)[number][step];
  const mark = rollout.marks.some(one => one[0] === step + 1) ? " marked" : "";
  const cell = make("i", (value === undefined ? "unknown" : isValue ? colour(value) : level(value, scale)) + mark);
  cell.title = `step ${step + 1}: ${choice.by} ${isValue ? show(value) : signed(value)}, ${name}`;
  return cell;
}

function strips(rollout) {
  const isEvery = choice.e === EVERY, chosen = isEvery ? [...estimators.keys()] : [chosenEstimator()];
  const box = make("span", "strips");
  for (const number of chosen) {
    const strip = make("span", "strip", ...rollout.steps.map((_, step) => square(rollout, number, step)));
    if (isEvery) strip.prepend(make("b", "", estimators[number][1]));
    box.append(strip);
  }
  return box;
}

function creditCell(rollout, number, step) {
  const value = rollout.values[number][step], advantage = rollout.advantages[number][step];
  if (advantage === undefined) return make("td", "credit-cell", "–");
  const cell = make("td", "credit-cell", make("i", level(advantage, estimators[number][2])), make("b", "", signed(advantage)));
  if (value !== undefined) cell.append(make("span", "limits", "value " + show(value)));
  return cell;
}

function detail(rollout, gold) {
  const box = make("div", "detail"), here = Number(choice.step);
  const names = ["step", "", ...(rollout.rewards.length ? ["reward"] : []), ...estimators.map(one => one[1])];
  const body = rollout.steps.map((text, step) => {
    const row = make("tr", step + 1 === here ? "here" : "", make("th", "", String(step + 1)));
    row.append(make("td", "", make("span", "step", text === "" ? "(empty)" : text)));
    if (rollout.rewards.length) row.append(make("td", "", show(rollout.rewards[step])));
    row.append(...estimators.map((_, number) => creditCell(rollout, number, step)));
    return row;
  });
  box.append(make("p", "muted", "gold ", make("code", "", gold), ", answer ",
    rollout.answer === null ? "none" : make("code", "", rollout.answer), `, ended by ${rollout.finish}, policy version ${rollout.version}`));
  if (rollout.believed.length) {
    const listed = rollout.believed.flatMap(([answer, value]) => [", ", make("code", "", answer), " " + show(value)]);
    box.append(make("p", "muted", "rewarded by the probabilities ", ...listed.slice(1)));
  }
  const head = make("thead", "", make("tr", "", ...names.map(name => make("th", "", name))));
  box.append(make("div", "scroll", make("table", "steps-table", head, make("tbody", "", ...body))));
  return box;
}

function toggle(box, isOpen) {
  const old = box.querySelector(".detail");
  if (old) old.remove();
  if (isOpen) box.append(detail(box.rollout, box.gold));
  box.querySelector(".head").setAttribute("aria-expanded", String(isOpen));
}

function rolloutBox(rollout, gold, at) {
  const button = make("button", "head", badge(rollout.right), make("code", "", "/" + rollout.id.split("/").pop()), strips(rollout));
  button.type = "button";
  button.setAttribute("aria-expanded", "false");
  button.append(make("span", "muted", `reward ${show(rollout.reward)}, ${rollout.steps.length} steps, ${rollout.tokens} tokens`));
  const box = make("div", "rollout", button);
  Object.assign(box, { rollout, gold });
  button.addEventListener("click", () => {
    const isOpen = !box.querySelector(".detail");
    Object.assign(choice, { p: isOpen ? groups.problem[at] : "", r: isOpen ? rollout.id : "", step: "" });
    remember(at);
    toggle(box, isOpen);
  });
  return box;
}

async function card(at) {
  const group = (await block(groups.block[at]))[groups.place[at]];
  const all = make("a", "", make("code", "", groups.problem[at]));
  all.href = "#" + new URLSearchParams({ it: "all", q: groups.problem[at] });
  all.title = "this problem in all iterations";
  const head = make("header", "", make("b", "", `iteration ${groups.iteration[at]}`), all);
  head.append(make("span", "muted", `${groups.right[at]} of ${groups.ids[at].length} right, mean reward ${show(groups.reward[at])}`));
  const boxes = group.rollouts.map(rollout => rolloutBox(rollout, group.gold, at));
  const made = make("article", "card group", head, make("div", "prompt", group.prompt), ...boxes);
  made.dataset.group = at;
  return made;
}

// --- finding -----------------------------------------------------------------------------------------------

async function textHolds(wanted, candidates, isCurrent) {
  const held = new Set();
  for (const at of candidates) {
    const group = (await block(groups.block[at]))[groups.place[at]];
    if (!isCurrent()) return null;
    const texts = [group.prompt, ...group.rollouts.map(rollout => rollout.steps.join(""))];
    if (texts.some(text => text.toLowerCase().includes(wanted))) held.add(at);
  }
  return held;
}

async function find() {
  const search = ++searches, isCurrent = () => search === searches, wanted = choice.q.trim().toLowerCase();
  let kept = [...groups.problem.keys()].filter(at => (choice.it === "" || groups.iteration[at] === Number(choice.it))
    && (choice.only !== "mixed" || (groups.right[at] > 0 && groups.right[at] < groups.ids[at].length))
    && (choice.only !== "marked" || groups.worst[at] > 0));
  if (wanted && choice.in === "ids") {
    kept = kept.filter(at => [groups.problem[at], ...groups.ids[at]].some(id => id.toLowerCase().includes(wanted)));
  } else if (wanted) {
    const held = await textHolds(wanted, kept, isCurrent);
    if (held === null) return;
    kept = kept.filter(at => held.has(at));
  }
  const key = SORTS[choice.sort][1];
  if (key) kept.sort((one, other) => key(one) - key(other) || one - other);
  found = kept;
  shown = 0;
  byId("list").replaceChildren();
  const rollouts = found.reduce((sum, at) => sum + groups.ids[at].length, 0);
  byId("status").textContent = `${found.length.toLocaleString("en")} of ${groups.problem.length.toLocaleString("en")} groups, ${rollouts.toLocaleString("en")} rollouts`;
  await more(isCurrent);
}

async function more(isCurrent = () => true) {
  const cards = [];
  for (const at of found.slice(shown, shown + PAGE)) cards.push(await card(at));
  if (!isCurrent()) return;
  byId("list").append(...cards);
  shown += cards.length;
  byId("more").hidden = shown >= found.length;
  byId("more").textContent = `show ${Math.min(PAGE, found.length - shown)} more`;
}

// --- disagreements -----------------------------------------------------------------------------------------

function disagreementRow(row) {
  const [at, place, step, one, other, first, second] = row;
  const link = make("a", "", make("code", "", groups.ids[at][place]));
  link.href = "#" + new URLSearchParams({ it: groups.iteration[at], p: groups.problem[at], r: groups.ids[at][place], e: EVERY, step });
  const cells = [make("td", "", show(Math.min(Math.abs(first), Math.abs(second)))), make("td", "", String(groups.iteration[at]))];
  cells.push(make("td", "", make("code", "", groups.problem[at])), make("td", "", link), make("td", "", String(step)));
  const both = [[one, first], [other, second]].flatMap(([number, value]) =>
    [make("i", level(value, estimators[number][2])), `${signed(value)} ${estimators[number][1]} `]);
  return make("tr", "", ...cells, make("td", "credit-cell", ...both));
}

function listDisagreements() {
  const pair = byId("pair").value, key = COLUMNS[column][1];
  listed = disagreements.filter(row => pair === "" || `${row[3]},${row[4]}` === pair);
  listed.sort((one, other) => compare(key(one), key(other)));
  const heads = COLUMNS.map(([name], number) => {
    const button = make("button", "", name + (number === column ? " ▾" : ""));
    button.type = "button";
    button.addEventListener("click", () => { column = number; listDisagreements(); });
    const head = make("th", "", button);
    if (number === column) head.setAttribute("aria-sort", "ascending");
    return head;
  });
  const body = make("tbody", "", ...listed.slice(0, rows).map(disagreementRow));
  byId("disagreement-list").replaceChildren(make("table", "", make("thead", "", make("tr", "", ...heads)), body));
  byId("more-disagreements").hidden = rows >= listed.length;
}

// --- what is chosen ----------------------------------------------------------------------------------------

const chosenEstimator = () => Math.max(0, estimators.findIndex(one => one[0] === choice.e));

// `at`: the group of the rollout that was opened, which the address then names whole.
function remember(at) {
  const iteration = choice.r && at !== undefined ? groups.iteration[at] : choice.it || "all";
  putIntoAddress({ ...choice, it: String(iteration) }, USUAL);
}

function recall() {
  const read = new URLSearchParams(location.hash.slice(1)), get = name => read.get(name) || "";
  const last = iterations.length ? String(iterations[iterations.length - 1]) : "";
  const wanted = get("it"), known = iterations.map(String), isEstimator = estimators.some(one => one[0] === get("e"));
  choice = {
    q: get("q"), in: get("in") === "text" ? "text" : "ids", p: get("p"), r: get("r"), step: get("step"),
    only: ["mixed", "marked"].includes(get("only")) ? get("only") : "", sort: SORTS[get("sort")] ? get("sort") : "iteration",
    it: wanted === "all" ? "" : known.includes(wanted) ? wanted : last,
    e: get("e") === EVERY || isEstimator ? get("e") : "", by: get("by") === "value" ? "value" : "advantage",
  };
}

function putIntoControls() {
  byId("q").value = choice.q;
  for (const name of ["in", "only", "sort", "it", "e", "by"]) byId(name).value = choice[name];
  const isValue = choice.by === "value";
  const marks = isValue ? [["v0", "0"], ["v1", ""], ["v2", "0.5"], ["v3", ""], ["v4", "1"]]
    : [["n3", "worse"], ["n2", ""], ["n1", ""], ["z", "0"], ["p1", ""], ["p2", ""], ["p3", "better"]];
  const keys = marks.map(([name, text]) => make("span", "", make("i", name), text));
  keys.push(make("span", "", make("i", "z marked"), "estimators disagree"));
  if (!isValue) keys.push(make("span", "muted", "full colour: " + estimators.map(one => `${show(one[2])} ${one[1]}`).join(", ")));
  byId("legend").replaceChildren(...keys);
}

function recolour() {
  putIntoControls();
  remember(openGroup());
  for (const box of document.querySelectorAll(".rollout")) box.querySelector(".strips").replaceWith(strips(box.rollout));
}

const openGroup = () => choice.r === "" ? undefined : groups.ids.findIndex(ids => ids.includes(choice.r));

async function arrive() {
  recall();
  putIntoControls();
  await find();
  const at = groups.problem.findIndex((problem, number) => (choice.p === "" || problem === choice.p)
    && groups.iteration[number] === Number(choice.it) && (choice.r === "" ? choice.p !== "" : groups.ids[number].includes(choice.r)));
  if (at < 0) return;
  let box = byId("list").querySelector(`[data-group="${at}"]`);
  if (!box) byId("list").prepend(box = await card(at));
  const opened = [...box.querySelectorAll(".rollout")].find(one => one.rollout.id === choice.r);
  if (opened) toggle(opened, true);
  (opened || box).scrollIntoView({ behavior: "instant" });
}

function chosen() {
  Object.assign(choice, { p: "", r: "", step: "" });
  putIntoControls();
  remember();
  find();
}

function goTo(direction) {
  const place = iterations.indexOf(Number(choice.it)) + (choice.it === "" ? direction < 0 ? iterations.length + 1 : 0 : 0) + direction;
  if (place < 0 || place >= iterations.length) return;
  choice.it = String(iterations[place]);
  chosen();
}

function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || ["INPUT", "SELECT"].includes(event.target.tagName)) return;
  const heads = [...document.querySelectorAll(".rollout .head")], place = heads.indexOf(document.activeElement);
  const keys = ["", ...estimators.slice(1).map(one => one[0]), EVERY];
  if (event.key === "j" || event.key === "k") {
    const next = heads[place < 0 ? 0 : place + (event.key === "j" ? 1 : -1)];
    if (next) next.focus();
  } else if (event.key === "[" || event.key === "]") goTo(event.key === "[" ? -1 : 1);
  else if (event.key === "e") { choice.e = keys[(keys.indexOf(choice.e) + 1) % keys.length]; recolour(); }
  else if (event.key === "v") { choice.by = choice.by === "value" ? "advantage" : "value"; recolour(); }
}

function controls() {
  for (const [key, [name]] of Object.entries(SORTS)) byId("sort").append(new Option(name, key));
  for (const iteration of iterations) byId("it").append(new Option(iteration, iteration));
  for (const [key, name] of estimators) byId("e").append(new Option(name, key));
  if (estimators.length > 1) byId("e").append(new Option("all side by side", EVERY));
  if (!estimators.some(one => one[3])) byId("by").querySelector("[value=value]").disabled = true;
  whenTyped(byId("q"), () => { choice.q = byId("q").value; if (choice.q) choice.it = ""; chosen(); });
  for (const name of ["in", "only", "sort", "it"]) {
    byId(name).addEventListener("change", () => { choice[name] = byId(name).value; chosen(); });
  }
  for (const name of ["e", "by"]) byId(name).addEventListener("change", () => { choice[name] = byId(name).value; recolour(); });
  byId("earlier").addEventListener("click", () => goTo(-1));
  byId("later").addEventListener("click", () => goTo(1));
  byId("more").addEventListener("click", () => more());
  addEventListener("keydown", press);
  addEventListener("hashchange", () => { if (location.hash.includes("=")) arrive(); });
  if (!disagreements.length) return;
  for (const pair of new Set(disagreements.map(row => `${row[3]},${row[4]}`))) {
    byId("pair").append(new Option(pair.split(",").map(number => estimators[number][1]).join(" against "), pair));
  }
  byId("pair").addEventListener("change", () => { rows = ROWS; listDisagreements(); });
  byId("more-disagreements").addEventListener("click", () => { rows += 5 * ROWS; listDisagreements(); });
  listDisagreements();
}

openPage(async () => {
  ({ estimators, groups, disagreements } = await unpack("index"));
  iterations = [...new Set(groups.iteration)].sort((one, other) => one - other);
  controls();
  await arrive();
}, "the rollouts");

"use strict";
// What the pages with packed blocks share: they unpack a block when something in it is looked at.
// Text reaches a page as text only (textContent); what is chosen is in the address after #.

const KEPT_BLOCKS = 12;
const blocks = new Map();

const byId = name => document.getElementById(name);
const show = number => number === null || number === undefined ? "–" : number.toFixed(2);
const colour = value => value === null ? "unknown" : "v" + Math.min(4, Math.max(0, Math.floor(value * 5)));

function make(name, className, ...children) {
  const element = document.createElement(name);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

async function unpack(name) {
  const packed = atob(byId(name).textContent), bytes = new Uint8Array(packed.length);
  for (let at = 0; at < packed.length; at++) bytes[at] = packed.charCodeAt(at);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

async function block(number) {
  const known = blocks.get(number) || await unpack("block-" + number);
  blocks.delete(number);
  blocks.set(number, known);
  if (blocks.size > KEPT_BLOCKS) blocks.delete(blocks.keys().next().value);
  return known;
}

function badge(isRight) {
  return make("span", "badge " + (isRight ? "good" : "bad"), isRight ? "✓ right" : "✗ wrong");
}

function putIntoAddress(choice, usual) {
  const written = new URLSearchParams();
  for (const [name, value] of Object.entries(choice)) {
    const text = Array.isArray(value) ? value.join(",") : value;
    if (text !== "" && text !== usual[name]) written.set(name, text);
  }
  try {
    history.replaceState(null, "", "#" + written);
  } catch (error) {
    // a page shown inside another (a notebook) has no address to change
  }
}

// `call` once typing has stopped.
function whenTyped(field, call) {
  let waiting = 0;
  field.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(call, 250);
  });
}

async function openPage(start, what) {
  try {
    if (typeof DecompressionStream === "undefined") throw new Error("this browser is too old: it has no DecompressionStream (2023)");
    await start();
    document.body.dataset.ready = "true";
  } catch (error) {
    byId("status").textContent = `cannot show ${what}: ${error.message}`;
  }
}

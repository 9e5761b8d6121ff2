// Zooms by click and searches; without it the picture is whole and has its titles.
"use strict";
for (const flame of document.querySelectorAll("svg.flame[role=img]")) {
  const boxes = [...flame.querySelectorAll("svg.box")].map(el => ({
    el, x: +el.dataset.x, w: +el.dataset.w, d: +el.dataset.d,
    name: el.querySelector("text").textContent, about: el.querySelector("title").textContent, hit: false,
  }));
  const info = flame.querySelector("text.info");
  const tools = flame.querySelector(".tools");
  const input = tools.querySelector("input");
  let at = null, told = "";
  const say = text => { info.textContent = text || told || " "; };

  // zoom gives the whole width to one box: those above it stay whole, others go.
  function zoom(to) {
    at = to;
    const x0 = to ? to.x : 0, w = to ? to.w : 1, d = to ? to.d : 0, slack = 1e-6;
    for (const b of boxes) {
      const above = to && b.d < d && b.x <= x0 + slack && b.x + b.w >= x0 + w - slack;
      const inside = b.d >= d && b.x >= x0 - slack && b.x + b.w <= x0 + w + slack;
      b.el.style.display = above || inside ? "" : "none";
      b.el.classList.toggle("above", !!above);
      b.el.setAttribute("x", above ? "0%" : 100 * (b.x - x0) / w + "%");
      b.el.setAttribute("width", above ? "100%" : 100 * b.w / w + "%");
    }
    count();
  }

  // count tells how much of what is in sight the search found; a box within
  // another that was found is not counted again.
  function count() {
    const hits = boxes.filter(b => b.hit && b.el.style.display !== "none" && !b.el.classList.contains("above"));
    let sum = 0, end = -1;
    for (const b of hits.sort((a, b) => a.x - b.x || a.d - b.d)) {
      if (b.x >= end - 1e-9) { sum += b.w; end = b.x + b.w; }
    }
    told = input.value ? "found: " + hits.length + " boxes, " + (100 * sum / (at ? at.w : 1)).toFixed(1) + " % of the picture" : "";
    say("");
  }

  function search() {
    let re = null;
    try { re = input.value ? new RegExp(input.value, "i") : null; } catch { told = "not a regular expression"; say(""); return; }
    for (const b of boxes) {
      b.hit = !!re && re.test(b.name);
      b.el.classList.toggle("hit", b.hit);
    }
    flame.classList.toggle("searched", !!re);
    count();
  }

  for (const b of boxes) {
    b.el.addEventListener("click", () => zoom(b.d ? b : null));
    b.el.addEventListener("mouseenter", () => say(b.about));
    b.el.addEventListener("mouseleave", () => say(""));
  }
  tools.style.display = "";
  input.addEventListener("input", search);
  tools.querySelector("button.reset").addEventListener("click", () => { input.value = ""; search(); zoom(null); });
  document.addEventListener("keydown", event => {
    if (event.key === "Escape") { input.value = ""; search(); zoom(null); }
    if (event.key === "/" && document.activeElement !== input) { event.preventDefault(); input.focus(); }
  });
}

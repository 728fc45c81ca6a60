// Draws the series of a page with uPlot; without it the picture that the server has drawn stays.
(function () {
  "use strict";
  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }
  var day = "\n{YYYY}-{MM}-{DD}";  // dates and hours as on every page, whatever the browser's locale and zone
  var clock = [
    [86400, "{YYYY}-{MM}-{DD}", null, null, null, null, null, null, 1],
    [60, "{HH}:{mm}", day, null, day, null, null, null, 1],
    [1, "{HH}:{mm}:{ss}", day, null, day, null, null, null, 1]
  ];
  function draw(box) {
    fetch(box.dataset.series, { credentials: "same-origin" })
      .then(function (answer) { return answer.ok ? answer.json() : null; })
      .then(function (told) {
        if (!told || !told.at.length || !box.isConnected) return;
        var colours = ["--soft", "--accent"];
        var axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, size: 46, font: "11px system-ui" };
        var options = {
          width: Math.max(200, box.clientWidth), height: 164, padding: [8, 8, 0, 0],
          tzDate: function (seconds) { return uPlot.tzDate(new Date(seconds * 1e3), "Etc/UTC"); },
          axes: [Object.assign({}, axis, { size: 40, values: clock }), Object.assign({}, axis, {
            values: function (_, ticks) {
              return ticks.map(function (n) { return n >= 1e6 ? n / 1e6 + "M" : n >= 1e3 ? n / 1e3 + "K" : n; });
            }
          })],
          series: [{ label: "time", value: "{YYYY}-{MM}-{DD} {HH}:{mm} UTC" }].concat(told.lines.map(function (line, n) {
            return { label: line.label, stroke: colour(colours[told.lines.length > 1 ? n % 2 : 1]), width: 1.5, points: { show: false } };
          }))
        };
        box.replaceChildren();
        new uPlot(options, [told.at].concat(told.lines.map(function (line) { return line.values; })), box);
        box.classList.add("drawn");
      })
      .catch(function () {});
  }
  function all(root) {
    if (!window.uPlot || !root.querySelectorAll) return;
    if (root.matches && root.matches("[data-series]")) draw(root);
    Array.from(root.querySelectorAll("[data-series]")).forEach(draw);
  }
  var here = document.querySelector(".top nav [aria-current]");  // on a telephone it may be beyond the edge
  if (here) here.scrollIntoView({ block: "nearest", inline: "nearest" });
  document.addEventListener("htmx:load", function (event) { all(event.detail.elt); });
  var waiting;
  window.addEventListener("resize", function () {
    clearTimeout(waiting);
    waiting = setTimeout(function () { all(document.body); }, 200);
  });
})();

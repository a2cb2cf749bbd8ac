"use strict";
(function () {
  var dark = window.matchMedia("(prefers-color-scheme: dark)");
  var plots = [];

  function ink() {
    var style = getComputedStyle(document.documentElement);
    var card = style.getPropertyValue("--card").trim();
    var text = style.getPropertyValue("--ink").trim();
    return {
      "font.color": text,
      "hoverlabel.bgcolor": card,
      "hoverlabel.bordercolor": style.getPropertyValue("--soft").trim(),
      "hoverlabel.font.color": text,
      "modebar.color": style.getPropertyValue("--soft").trim(),
      "modebar.activecolor": text,
      "modebar.bgcolor": "rgba(0,0,0,0)"
    };
  }

  document.querySelectorAll(".plot").forEach(function (plot) {
    var figure = JSON.parse(document.getElementById(plot.id + "-data").textContent);
    var config = { responsive: true, displaylogo: false, showSendToCloud: false, plotlyServerURL: "" };
    plots.push(Plotly.newPlot(plot, figure.data, figure.layout, config).then(function () {
      return Plotly.relayout(plot, ink());
    }));
  });
  dark.addEventListener("change", function () {
    document.querySelectorAll(".plot").forEach(function (plot) { Plotly.relayout(plot, ink()); });
  });
  Promise.all(plots).then(function () {
    document.querySelectorAll("details.twin").forEach(function (twin) { twin.open = false; });
    document.documentElement.dataset.ready = "yes";
  });
})();

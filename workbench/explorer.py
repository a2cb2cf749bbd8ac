"""An explorer of layouts for notebooks: pick a system, move the sizes, see the groups; refusals are explained."""

from __future__ import annotations

from functools import partial
from html import escape
from typing import Any

import ipywidgets

from workbench.errors import LayoutError
from workbench.ranks import MAX_WORLD_SIZE, SYSTEMS, GroupMap
from workbench.views import Shown, show_group_map

MAX_DRAWN = 1024
"""The widest world that is drawn; wider ones are told in a line."""

_SLIDER_MAX = 32  # `set` and the offered choices widen a slider


class LayoutExplorer:
    """Widgets over `GroupMap.build`: a dropdown for the system, a slider or box for each size, the map below.

    LayoutExplorer("sglang", tp=8, attn_cp=2)
    A choice that the system refuses leaves the last map standing and shows the LayoutError's own text, with a button
    for each nearest legal choice. A size that may be left out is left out at 0.
    `group_map` is the map that is drawn, for the next cell to use. A stored notebook keeps the figure, not the widgets.
    Raises: LayoutError if the sizes to start from are refused.
    """

    def __init__(self, system: str = "sglang", **sizes: Any) -> None:
        self.group_map = GroupMap.build(system, **sizes)
        self._system = ipywidgets.Dropdown(options=sorted(SYSTEMS), value=system, description="system")
        self._sizes = ipywidgets.GridBox(
            layout={"grid_template_columns": "repeat(auto-fill, minmax(320px, 1fr))", "grid_gap": "2px 12px"}
        )
        self._message = ipywidgets.HTML()
        self._choices = ipywidgets.HBox(layout={"flex_flow": "row wrap"})
        self._map = ipywidgets.Output()
        self._controls: dict[str, Any] = {}
        self._quiet = False
        self._problem = ""
        self._box = ipywidgets.VBox([self._system, self._sizes, self._message, self._choices, self._map])
        self._make_controls(sizes)
        self._system.observe(self._change_system, names="value")
        self._draw()

    @property
    def shown(self) -> Shown:
        """The map as it is drawn now, without widgets."""
        if self.group_map.world_size > MAX_DRAWN:
            return Shown({"text/plain": f"{self.group_map.title()}: wider than {MAX_DRAWN} ranks, so it is not drawn"})
        return show_group_map(self.group_map)

    @property
    def problem(self) -> str:
        """Why the sizes that are set now are refused, or an empty text."""
        return self._problem

    def set(self, **sizes: Any) -> None:
        """Set sizes as if by hand, all at once. Raises: LayoutError for a name that the system does not have."""
        unknown = sorted(set(sizes) - set(self._controls))
        if unknown:
            raise LayoutError(
                f"{self._system.value} has no size {unknown[0]!r} to set; known: {', '.join(self._controls)}"
            )
        self._quiet = True
        try:
            for name, value in sizes.items():
                _put(self._controls[name], value)
        finally:
            self._quiet = False
        self._draw()

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """The widgets, and the figure for wherever there are none."""
        return {**self._box._repr_mimebundle_(**kwargs), **self.shown.data}

    def _change_system(self, _: Any) -> None:
        """Another system: its own sizes, all at their defaults but tp=4, so that there is something to see."""
        self._make_controls({"tp": 4})
        self._draw()

    def _make_controls(self, sizes: dict[str, Any]) -> None:
        self._controls = {}
        for name, spec in SYSTEMS[self._system.value].specs.items():
            if name == "world" and self._system.value != "megatron":
                continue  # elsewhere it is what the other sizes give
            control = _control(name, spec.form.name, sizes.get(name, spec.default))
            if control is not None:
                control.observe(self._changed, names="value")
                self._controls[name] = control
        self._sizes.children = tuple(self._controls.values())

    def _changed(self, _: Any) -> None:
        if not self._quiet:
            self._draw()

    def _draw(self) -> None:
        chosen = {name: _value(control) for name, control in self._controls.items()}
        specs = SYSTEMS[self._system.value].specs
        told = {name: value for name, value in chosen.items() if value != specs[name].default}
        try:
            self.group_map = GroupMap.build(self._system.value, **told)
        except LayoutError as e:
            self._problem = str(e)
            self._message.value = _refusal(self._problem)
            self._choices.children = tuple(self._button(n, v) for n, v in e.nearest if n in chosen)
            return
        self._problem = ""
        self._message.value = f"<b>{escape(_summary(self.group_map))}</b>"
        self._choices.children = ()
        data = self.shown.data
        self._map.outputs = ({"output_type": "display_data", "data": data, "metadata": {}},)

    def _button(self, name: str, value: Any) -> Any:
        button = ipywidgets.Button(description=f"{name} = {value}", tooltip=f"set {name} to {value}")
        button.on_click(partial(self._take, name, value))
        return button

    def _take(self, name: str, value: Any, _: Any) -> None:
        self.set(**{name: value})


def _control(name: str, form: str, value: Any) -> Any:
    """The widget for one size, or None for sizes that are lists or mappings: those are for code."""
    if name == "world":
        return ipywidgets.BoundedIntText(value=value or 0, min=0, max=MAX_WORLD_SIZE, description=name, style=_STYLE)
    if form == "FLAG":
        return ipywidgets.Checkbox(value=bool(value), description=name, style=_STYLE, indent=False)
    if form == "TEXT":
        return ipywidgets.Text(value=value, description=name, continuous_update=False, style=_STYLE)
    if form not in _LOWEST:
        return None
    slider = ipywidgets.IntSlider(
        min=_LOWEST[form], max=_SLIDER_MAX, description=name, continuous_update=False, style=_STYLE, layout=_WIDE
    )
    _put(slider, value)
    return slider


_LOWEST = {"WIDTH": 1, "LOOSE": 1, "OPTIONAL_WIDTH": 0, "OPTIONAL_LOOSE": 0}
_STYLE = {"description_width": "130px"}
_WIDE = {"width": "98%"}


def _put(control: Any, value: Any) -> None:
    if isinstance(control, ipywidgets.IntSlider):
        control.max = max(control.max, value or 0)
    control.value = control.min if value is None else value


def _value(control: Any) -> Any:
    """What the widget says; a number at 0 is left out."""
    if isinstance(control, (ipywidgets.IntSlider, ipywidgets.BoundedIntText)) and control.value == 0:
        return None
    return control.value


def _refusal(text: str) -> str:
    return (
        '<div role="alert" style="border-left: 4px solid #D55E00; padding: 2px 10px; line-height: 1.5">'
        f"{escape(text)}<br><i>The map below is still the last legal one.</i></div>"
    )


def _summary(group_map: GroupMap) -> str:
    world = group_map.world_size
    shared = [kind for kind, lists in group_map.groups.items() if any(1 < len(ranks) < world for ranks in lists)]
    return f"{world} rank{'' if world == 1 else 's'}; kinds that cut the world: {', '.join(shared) or 'none'}"

"""Collectives of torch.distributed by the name of their function, as whoever records them needs to know them."""

ROOTED = {
    "broadcast": "src",
    "reduce": "dst",
    "gather": "dst",
    "scatter": "src",
    "broadcast_object_list": "src",
    "gather_object": "dst",
    "scatter_object_list": "src",
}
"""Those with a root, and the parameter that takes its world rank; `group_<it>` takes its place in the group."""

PLAIN = (
    *("all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_coalesced", "all_gather_into_tensor"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"),
    *("all_gather_object", "barrier", "monitored_barrier"),
)
"""Those without."""

"""What every form moves, and which one a call gets: the table behind ``form="auto"`` and the peer form's two ways.

Bytes a rank receives for one all-reduce of E values, roots in fp32 and results of ``out_bytes`` (2 for bf16):

============  ==============================  =====  =====  =====
form          bytes                           tp 2   tp 4   tp 8   (times E, bf16 results)
============  ==============================  =====  =====  =====
gather        4 (tp - 1)                      4      12     28
scatter       (4 + out_bytes) (tp - 1) / tp   3      4.5    5.25
hierarchical  as scatter; 1 / node_size of    3      4.5    5.25
              it, less what is inside a node,
              between nodes
============  ==============================  =====  =====  =====

A ring all-reduce of the bf16 tensor receives 4 (tp - 1) / tp: 2, 3 and 3.5. Roots travel unrounded, so scatter moves
1.5 times the bytes of stock at every degree, and nothing that keeps the bits moves fewer: the tree needs all 32 bits of
each root once, each finished value has to reach every rank.
"""

ROOT_BYTES = 4

SECOND_STEP_BYTES = {"backend": 8 << 20, "peer": 1 << 20}
"""What a link moves while a second exchange starts. Calculated, not measured, from 400 GB/s: 20 us for another backend
collective, 2.5 us for another kernel of the peer form, which passes no further fence."""


def received_bytes(form: str, ranks: int, elements: int, out_bytes: int) -> int:
    """Bytes one rank receives for an all-reduce of ``elements`` fp32 values in ``form``, "gather" or "scatter".

    "hierarchical" receives as many as "scatter" over both of its levels.
    """
    if form == "gather":
        return ROOT_BYTES * (ranks - 1) * elements
    return (ROOT_BYTES + out_bytes) * (ranks - 1) * elements // ranks


def gathers(transport: str, ranks: int, elements: int, out_bytes: int) -> bool:
    """Whether all roots go to every rank at once: the bytes that scattering saves are fewer than its second step costs.

    ``transport`` is "backend" or "peer".
    """
    gather, scatter = (received_bytes(form, ranks, elements, out_bytes) for form in ("gather", "scatter"))
    return gather - scatter <= SECOND_STEP_BYTES[transport]

"""What Pallas has no words for: PTX and Mosaic inside of a kernel, each beside what it means.

    operation.py    an operation, and its meaning where the kernel is simulated
    words.py        single words: in shared memory, counters and flags
    arrays.py       arrays in registers: taken apart, stored and loaded
    wgmma.py        WGMMAs of any depth of 16, and of any width of 8
    widen.py        weights of few bits become elements of 16 bits
    left_sums.py    sums that a CTA leaves in global memory for another one
    small.py        integers of few bits become bfloat16, scaled or not, in one instruction
    form.py         how they lie in a slot, and which thread has which rows
    weights.py      how a warpgroup loads them from there
    row_order.py    rows of their sums, in the order of WGMMA
    sums.py         sums in registers, and what is added to them
    multiply.py     WGMMAs whose left operand is in registers
    fragments.py    a step of a warpgroup: weights are loaded, widened, scaled, multiplied
    cluster.py      sums that CTAs of a cluster hand over
    scaled.py       WGMMAs into fresh registers, whose products are scaled and added
    quick.py        exp and the logistic function in two and four instructions
    zeros.py        zeros in place of rows of a slot
    mailbox.py      tiles that one thread claims for a cluster
    find_group.py   the group that a row of tiles is in, found by a warp
    copy_block.py   a block of memory that a warp copies
    fences.py       fences

No other module of the kernels has PTX or Mosaic in it, and none but those that plan a launch asks
whether it is simulated.
"""

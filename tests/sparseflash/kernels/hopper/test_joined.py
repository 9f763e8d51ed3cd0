"""Products of 80, 96 and 192 columns, joined in PTX. What they compute is a matter of a GPU."""

import re
from collections import Counter

import pytest

pytest.importorskip("triton.experimental.gluon")

from triton import knobs

from sparseflash.kernels.hopper import joined
from sparseflash.kernels.hopper.joined import is_joined, joined_products


def join_products(ptx, *columns):
    return joined.join_products(ptx, columns or (80, 96))


def product(n, sums, left, right, first="%p1"):
    return (
        f"\twgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{sums}}}, {{{left}}}, {right},"
        f" {first}, 1, 1, 1;"
    )


# of right operands in panels of 32 columns, 4096 bytes apart; of 64 columns; without a distance
PANELS_OF_32, PANELS_OF_64 = 0x8000002001000000, 0x4000004001000000
NO_DISTANCE = 0x8000002000000000


def code(between=(), left=("%r1,%r2,%r3,%r4", "%r5,%r6,%r7,%r8"), rest=32, first="%p1", more=(),
         descriptor=PANELS_OF_32, n=64):  # fmt: skip
    return "\n".join(
        [
            f"\tor.b64 \t%rd1, %rd9, {descriptor - 2**64};",
            "\twgmma.fence.sync.aligned;",
            product(n, "%f1,%f2", "%r1,%r2,%r3,%r4", "%rd1"),
            product(n, "%f1,%f2", "%r5,%r6,%r7,%r8", "%rd2"),
            "\twgmma.commit_group.sync.aligned;",
            *between,
            "\twgmma.fence.sync.aligned;",
            product(rest, "%f3", left[0], "%rd3", first),
            product(rest, "%f3", left[1], "%rd4"),
            "\twgmma.commit_group.sync.aligned;",
            *more,
        ]
    )


def widths(ptx):
    return Counter(map(int, re.findall(r"m64n(\d+)k16", ptx)))


COPIED = [f"\tmov.b32 \t%r1{i}, %r{i};" for i in range(1, 9)]
OF_COPIES = "%r11,%r12,%r13,%r14", "%r15,%r16,%r17,%r18"


@pytest.mark.parametrize("rest", [16, 32])
def test_products_of_the_same_left_operand_are_joined(rest):
    joined = join_products(code(rest=rest))
    assert widths(joined) == {64 + rest: 2}
    assert product(64 + rest, "%f1,%f2,%f3", "%r1,%r2,%r3,%r4", "%rd1") in joined
    assert product(64 + rest, "%f1,%f2,%f3", "%r5,%r6,%r7,%r8", "%rd2") in joined
    assert joined.count("commit_group") == 2  # what waits counts them
    # where the second was: its sums may be set between the two
    assert joined.index(f"n{64 + rest}k16") > joined.rindex("fence")


def test_panels_of_64_columns_serve_for_more_than_64():
    ptx = code(n=128, rest=64, descriptor=PANELS_OF_64)
    assert widths(join_products(ptx, 192)) == {192: 2}
    assert join_products(ptx) == ptx and join_products(code(), 192) == code()
    without = PANELS_OF_64 & ~(0x3FFF << 16)
    ptx = code(n=128, rest=64, descriptor=without)
    assert join_products(ptx, 192) == ptx
    assert [n for n in range(8, 257, 8) if is_joined(n)] == [80, 96, 192]


def test_copies_of_the_left_operand_are_the_same_operand():
    assert widths(join_products(code(COPIED, OF_COPIES))) == {96: 2}
    others = [line.replace("%r3;", "%r9;") for line in COPIED]
    assert widths(join_products(code(others, OF_COPIES))) == {64: 2, 32: 2}
    changed = ["\tadd.s32 \t%r3, %r3, 1;", *COPIED]
    assert widths(join_products(code(changed, OF_COPIES))) == {64: 2, 32: 2}
    loaded = ["\tld.shared.v2.b32 \t{%r3, %r4}, [%r20];", *COPIED]
    assert widths(join_products(code(loaded, OF_COPIES))) == {64: 2, 32: 2}
    changed = [*COPIED, "\tadd.s32 \t%r3, %r3, 1;"]  # later
    assert widths(join_products(code(changed, OF_COPIES))) == {96: 2}


@pytest.mark.parametrize(
    "changes",
    [
        {"left": ("%r1,%r2,%r3,%r9", "%r5,%r6,%r7,%r8")},
        {"first": "%p2"},  # one begins its sum, the other goes on
        {"between": ["\tadd.s32 \t%r3, %r3, 1;"]},
        {"between": ["\t@%p3 bra \t$L__BB0_1;"]},
        {"between": ["\twgmma.wait_group.sync.aligned 0;"]},
        {"descriptor": PANELS_OF_64},
        {"descriptor": NO_DISTANCE},
        {"rest": 64},
        {"rest": 128},
    ],
)
def test_others_stay_as_they_are(changes):
    ptx = code(**changes)
    assert join_products(ptx) == ptx


def test_all_are_joined_or_none():
    one_more = code(first="%p2").split("\n")
    ptx = code(more=["$L__BB0_2:", *one_more])
    assert join_products(ptx) == ptx
    ptx = code(more=["$L__BB0_2:", *code().split("\n")])
    assert widths(join_products(ptx)) == {96: 4}


def test_kernels_are_joined_inside_of_the_context_alone():
    stages = {"ptx": lambda source, metadata: code()}
    with joined_products([96]):
        with joined_products([192]):  # a kernel that is compiled while another one is
            pass
        hook = knobs.runtime.add_stages_inspection_hook
        assert hook is not None
        hook(None, stages, {}, None, None)
    assert knobs.runtime.add_stages_inspection_hook is None
    assert widths(stages["ptx"](None, {})) == {96: 2}
    keys = []
    for columns in ([80, 96], [96, 80], [96]):
        with joined_products(columns):
            keys.append(knobs.runtime.add_stages_inspection_hook())
    assert keys[0] == keys[1] != keys[2]  # kernels are kept by them


def test_a_hook_of_the_user_stays(monkeypatch):
    def own(*args):
        return "key", "hash"

    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", own)
    with joined_products([96]):
        assert knobs.runtime.add_stages_inspection_hook is own
    assert knobs.runtime.add_stages_inspection_hook is own

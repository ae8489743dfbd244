"""The innermost loops keep their sums in registers, on every kind of machine."""

import re
from functools import partial

import pytest

pytest.importorskip("numba", reason="compiled kernels need numba")

import llvmlite.binding as llvm
from llvmlite import ir

from adam_async.model.fast.squares import emit_best_of, emit_mean_of, emit_route, emit_spread
from adam_async.model.fast.tiles import ONE, REST, TWO, emit_dots, emit_tile, tile_vectors
from adam_async.model.fast.vectors import I64, POINTER, SETS, Registers, whole

# Processor, its triple, and the registers that it must be given.
MACHINES = [
    ("x86-64-v3", "x86_64-unknown-linux-gnu", SETS["avx2"]),
    ("x86-64-v4", "x86_64-unknown-linux-gnu", SETS["avx512"]),
    ("neoverse-n1", "aarch64-unknown-linux-gnu", SETS["neon"]),
    ("apple-m1", "aarch64-apple-darwin", SETS["neon"]),
]
STACK = {"x86_64": re.compile(r"\(%rsp"), "aarch64": re.compile(r"\[sp")}
"""Pattern of the stack's addresses; without a frame pointer there is only this one."""

ELEMENTS = [ir.FloatType(), ir.DoubleType()]


def function(arguments: int) -> tuple[ir.Module, ir.IRBuilder, list]:
    """Make a function with arguments in memory, like a kernel's on its tape."""
    module = ir.Module()
    made = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER]), "kernel")
    builder = ir.IRBuilder(made.append_basic_block("entry"))
    places = [builder.gep(made.args[0], [whole(number)], source_etype=I64) for number in range(arguments)]
    return module, builder, [builder.load(place, typ=I64, align=8) for place in places]


def tile(rows: int, width: str, access: str, element: ir.Type, registers: Registers) -> ir.Module:
    module, builder, arguments = function(10)
    *rest, left = arguments
    vector = tile_vectors(builder, element, width, left, registers)
    emit_tile(vector, rows, 2 if width == TWO else 1, access, rest)
    builder.ret_void()
    return module


def dots(element: ir.Type, registers: Registers) -> ir.Module:
    module, builder, arguments = function(9)
    emit_dots(builder, element, arguments, registers)
    builder.ret_void()
    return module


def assembly(module: ir.Module, processor: str, triple: str) -> list[str]:
    """Compile to assembly, optimised as kernels are."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=processor, opt=3)
    parsed = llvm.parse_assembly(str(module))
    parsed.triple, parsed.data_layout = triple, str(machine.target_data)
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(parsed, passes)
    return machine.emit_assembly(parsed).splitlines()


def innermost_loops(lines: list[str]) -> list[list[str]]:
    """Instructions of each innermost loop: those between a label and a jump back to it."""
    labels = {line.split(":")[0]: number for number, line in enumerate(lines) if re.match(r"\.?L\w+:", line)}
    spans = []
    for number, line in enumerate(lines):
        code = re.split(r"\s*(?:#|//|;)", line)[0].rstrip()
        jump = re.match(r"\t(?:j\w+|b(?:\.\w+)?|cbn?z|tbn?z)\t.*?(\.?LBB\w+)$", code)
        if jump and labels.get(jump[1], number) < number:
            spans.append((labels[jump[1]], number))
    inner = [a for a in spans if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
    return [lines[start : stop + 1] for start, stop in inner]


def stack_accesses(module: ir.Module, processor: str, triple: str) -> list[str]:
    loops = innermost_loops(assembly(module, processor, triple))
    assert loops, "there is no loop to look at"
    pattern = STACK[triple.split("-")[0]]
    return [line.strip() for loop in loops for line in loop if pattern.search(line)]


def look_at_tiles(processor: str, triple: str, registers: Registers, element: ir.Type, rows: int) -> None:
    for width in (ONE, TWO, REST):
        for access in ("rows", "columns", "table"):
            module = tile(rows, width, access, element, registers)
            assert stack_accesses(module, processor, triple) == [], f"{rows} rows of {width}, by {access}"


on_each_machine = pytest.mark.parametrize(
    ("processor", "triple", "registers"), MACHINES, ids=[row[0] for row in MACHINES]
)
for_each_element = pytest.mark.parametrize("element", ELEMENTS, ids=["float32", "float64"])


@on_each_machine
def test_no_sum_of_the_highest_tile_lies_on_the_stack(processor, triple, registers):
    look_at_tiles(processor, triple, registers, ir.FloatType(), registers.tile_rows)


@pytest.mark.thorough
@for_each_element
@on_each_machine
def test_no_sum_of_any_tile_lies_on_the_stack(processor, triple, registers, element):
    for rows in range(1, registers.tile_rows + 1):
        look_at_tiles(processor, triple, registers, element, rows)


@for_each_element
@on_each_machine
def test_no_sum_of_a_block_of_dots_lies_on_the_stack(processor, triple, registers, element):
    assert stack_accesses(dots(element, registers), processor, triple) == []


@pytest.mark.parametrize(
    ("emit", "arguments"),
    [
        (emit_best_of, 6),
        (partial(emit_route, adding=False), 8),
        (partial(emit_route, adding=True), 8),
        (emit_mean_of, 6),
        (partial(emit_spread, adding=False), 6),
        (partial(emit_spread, adding=True), 6),
    ],
    ids=["best_of", "route", "route_adding", "mean_of", "spread", "spread_adding"],
)
@on_each_machine
def test_no_loop_of_pooling_touches_the_stack(processor, triple, registers, emit, arguments):
    module, builder, given = function(arguments)
    if arguments == 6 and emit is not emit_best_of:  # the fifth is a share, not a whole number
        given[4] = builder.sitofp(given[4], ir.FloatType())
    emit(builder, ir.FloatType(), given, registers)
    builder.ret_void()

    assert stack_accesses(module, processor, triple) == []


def test_tiles_for_more_registers_would_spill():
    """Show that the tests above can fail: shapes for 32 registers, on a machine with 16."""
    too_many = Registers(32, 32, masked_loads=True, reads_operands=True)
    processor, triple, _ = MACHINES[0]

    assert len(stack_accesses(tile(12, TWO, "rows", ir.FloatType(), too_many), processor, triple)) >= 8
    assert len(stack_accesses(dots(ir.FloatType(), too_many), processor, triple)) >= 8

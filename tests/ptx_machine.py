"""The few PTX instructions of our inline assembly, run in Python: no GPU is needed to see that operands are in order.

Registers hold what their type says: integers for .b8, .b16, .b32, .b64, floats for .f32.
"""

import re
import struct

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def run_ptx(text, outputs, inputs):
    """The values of ``$0`` … of an inline assembly text with ``outputs`` outputs, given those of its inputs."""
    registers = {f"${outputs + i}": value for i, value in enumerate(inputs)}
    widths = {}
    for line in text.strip().strip("{}").split(";"):
        line = line.strip()
        if not line:
            continue
        if line.startswith(".reg"):
            _declare(line, widths)
            continue
        opcode, _, rest = line.partition(" ")
        operands = re.findall(r"\{[^}]*\}|[^,\s]+", rest)
        _execute(opcode, operands, registers, widths)
    return [registers[f"${i}"] for i in range(outputs)]


def _declare(line, widths):
    kind, _, names = line.removeprefix(".reg").strip().partition(" ")
    for name in names.split(","):
        name = name.strip()
        many = re.fullmatch(r"(\w+)<(\d+)>", name)
        for each in [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]:
            widths[each] = int(kind.removeprefix(".").lstrip("bf"))


def _execute(opcode, operands, registers, widths):
    target, *sources = operands
    values = [registers[s] for s in sources if s in registers]
    if opcode in ("mov.b32", "mov.b64"):
        if target.startswith("{"):
            names = re.findall(r"\w+", target)
            for i, name in enumerate(names):
                registers[name] = values[0] >> (widths[name] * i) & ((1 << widths[name]) - 1)
        else:
            names = re.findall(r"\w+", sources[0])
            registers[target] = sum(registers[name] << (widths[name] * i) for i, name in enumerate(names))
    elif opcode == "prmt.b32":  # d, a, b, selector: bytes 4 to 7 are those of b, a register or zero
        table = sum((v & 0xFFFFFFFF) << (32 * i) for i, v in enumerate(values))
        chosen = [table >> (8 * (int(sources[2], 0) >> (4 * i) & 7)) & 0xFF for i in range(4)]
        registers[target] = sum(byte << (8 * i) for i, byte in enumerate(chosen))
    elif opcode == "cvt.rn.f16x2.e2m1x2":
        registers[target] = _pair(*(E2M1[c & 7] * (-1 if c & 8 else 1) for c in (values[0] & 15, values[0] >> 4)))
    elif opcode == "cvt.rn.satfinite.e2m1x2.f32":  # the first source goes to the high half
        high, low = ((E2M1.index(abs(v)) | (8 if str(v)[0] == "-" else 0)) for v in values)
        registers[target] = high << 4 | low
    elif opcode == "cvt.f32.f16":
        registers[target] = struct.unpack("<e", struct.pack("<H", values[0]))[0]
    elif opcode == "add.f32":
        registers[target] = values[0] + values[1]
    elif opcode in ("mul.rn.f16x2", "add.rn.f16x2", "fma.rn.f16x2"):
        halves = [_halves(v) for v in values]
        act = {"mul": lambda a, b: a * b, "add": lambda a, b: a + b, "fma": lambda a, b, c: a * b + c}[opcode[:3]]
        registers[target] = _pair(act(*(h[0] for h in halves)), act(*(h[1] for h in halves)))
    else:
        raise NotImplementedError(opcode)


def _halves(word):
    return struct.unpack("<2e", struct.pack("<I", word))


def _pair(low, high):
    return struct.unpack("<I", struct.pack("<2e", low, high))[0]

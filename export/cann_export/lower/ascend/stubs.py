"""Stand-ins for the CANN libraries, so that the torch-npu wheel can be imported on a host without CANN.

TorchAir's converters are Python and never call CANN, but the wheel's extension modules link against it. For every
library and symbol that is missing, a tiny ELF shared object is written in which each function returns 0; no compiler
is needed and the bytes depend on the symbol names alone. When stubs may be loaded at all is decided in `toolchain.py`.
"""

from __future__ import annotations

import ctypes
import platform
import struct
from pathlib import Path

RETURN_ZERO = {
    "x86_64": (62, bytes.fromhex("31c0c3")),  # xor eax, eax; ret
    "aarch64": (183, bytes.fromhex("000080d2c0035fd6")),  # mov x0, #0; ret
}
"""Machine -> (ELF e_machine, code of a function that returns 0)."""

PAGE = 0x10000  # the largest page size of the two machines


def missing_from(site: Path, torch_lib: Path) -> tuple[list[str], list[str]]:
    """(libraries, symbols) that the torch_npu package under `site` needs and neither torch nor the system provides.

    torch must have been imported: its libraries are then found by name, and symbols are looked up by the dynamic linker
    itself.
    """
    from elftools.elf.dynamic import DynamicSection
    from elftools.elf.elffile import ELFFile

    package = site / "torch_npu"
    ours = sorted([*package.glob("lib/*.so"), *package.glob("_C*.so"), *package.glob("dynamo/torchair/core/*.so")])
    wanted: set[str] = set()
    defined: set[str] = set()
    libraries: set[str] = set()
    for path in ours:
        with path.open("rb") as file:
            elf = ELFFile(file)
            dynamic = elf.get_section_by_name(".dynamic")
            assert isinstance(dynamic, DynamicSection), path
            libraries.update(tag.needed for tag in dynamic.iter_tags("DT_NEEDED"))
            for symbol in elf.get_section_by_name(".dynsym").iter_symbols():
                if symbol["st_shndx"] != "SHN_UNDEF":
                    defined.add(symbol.name)
                elif symbol["st_info"]["bind"] == "STB_GLOBAL":
                    wanted.add(symbol.name)
    present = (ctypes.CDLL(str(torch_lib / "libtorch_python.so")), ctypes.CDLL(None))
    symbols = sorted(s for s in wanted - defined if not any(hasattr(library, s) for library in present))
    names = sorted(name for name in libraries - {path.name for path in ours} if not _loads(name))
    return names, symbols


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def write_stubs(folder: Path, libraries: list[str], symbols: list[str]) -> None:
    """Write one stub per library name; the first holds all symbols, the others none."""
    for i, name in enumerate(libraries):
        (folder / name).write_bytes(shared_object(name, symbols if i == 0 else [], platform.machine()))


def shared_object(soname: str, symbols: list[str], machine: str) -> bytes:
    """An ELF64 shared object named `soname` in which every symbol is a function returning 0.

    Format: System V ABI, chapters 4 and 5 (ELF header, program headers, dynamic section, symbol hash table).
    """
    e_machine, code = RETURN_ZERO[machine]
    strings = b"\0"
    offsets = []
    for name in [soname, *symbols]:
        offsets.append(len(strings))
        strings += name.encode() + b"\0"

    count = len(symbols) + 1
    buckets = max(1, count // 2)
    heads, chains = [0] * buckets, [0] * count
    for i, name in enumerate(symbols, start=1):
        slot = _elf_hash(name) % buckets
        chains[i], heads[slot] = heads[slot], i
    hashes = struct.pack(f"<{2 + buckets + count}I", buckets, count, *heads, *chains)

    header = 64 + 4 * 56
    hash_at = header
    symtab_at = _align(hash_at + len(hashes), 8)
    strtab_at = symtab_at + 24 * count
    code_at = _align(strtab_at + len(strings), 16)
    dynamic_at = _align(code_at + len(code), PAGE)
    entries = [struct.pack("<IBBHQQ", at, 0x12, 0, 1, code_at, len(code)) for at in offsets[1:]]  # global functions
    symtab = b"\0" * 24 + b"".join(entries)
    dynamic = b"".join(
        struct.pack("<qQ", tag, value)
        for tag, value in (
            (14, offsets[0]),  # DT_SONAME
            (4, hash_at),  # DT_HASH
            (5, strtab_at),  # DT_STRTAB
            (6, symtab_at),  # DT_SYMTAB
            (10, len(strings)),  # DT_STRSZ
            (11, 24),  # DT_SYMENT
            (0, 0),  # DT_NULL
        )
    )
    elf = b"\x7fELF\x02\x01\x01" + b"\0" * 9
    elf += struct.pack("<HHIQQQIHHHHHH", 3, e_machine, 1, 0, 64, 0, 0, 64, 56, 4, 64, 0, 0)
    text_size = code_at + len(code)
    elf += _segment(1, 5, 0, text_size, PAGE)  # PT_LOAD, read and execute
    elf += _segment(1, 6, dynamic_at, len(dynamic), PAGE)  # PT_LOAD, read and write: the linker relocates it
    elf += _segment(2, 6, dynamic_at, len(dynamic), 8)  # PT_DYNAMIC
    elf += _segment(0x6474E551, 6, 0, 0, 16)  # PT_GNU_STACK: no executable stack
    blob = bytearray(dynamic_at + len(dynamic))
    for at, part in ((0, elf), (hash_at, hashes), (symtab_at, symtab), (strtab_at, strings), (code_at, code)):
        blob[at : at + len(part)] = part
    blob[dynamic_at:] = dynamic
    return bytes(blob)


def _segment(kind: int, flags: int, at: int, size: int, align: int) -> bytes:
    return struct.pack("<IIQQQQQQ", kind, flags, at, at, at, size, size, align)


def _align(value: int, step: int) -> int:
    return -(-value // step) * step


def _elf_hash(name: str) -> int:
    value = 0
    for char in name.encode():
        value = (value << 4) + char
        high = value & 0xF0000000
        if high:
            value ^= high >> 24
        value &= ~high
    return value

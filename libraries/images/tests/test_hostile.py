"""200 images that are broken, lie about their size, or are made to use up memory or time."""

import json
import struct
import subprocess
import sys
import time
import zlib
from io import BytesIO
from pathlib import Path
from random import Random

import pytest
from PIL import Image

from rlhf_images import DecompressionBomb, ImageError, ImageLimits, decode_image

LIMITS = ImageLimits(max_pixels=1_000_000, max_bytes=2_000_000)
ANY = LIMITS.model_copy(update={"formats": ["png", "jpeg", "webp", "gif", "bmp", "tiff"]})
"""Limits of images whose name starts with `any`."""
MAX_SECONDS = 10.0
"""Processor time of one image. All of them take milliseconds."""
MAX_GROWTH_BYTES = 160 * 2**20
"""Far above 12 bytes per pixel of LIMITS, far below what the bombs would need."""


def encoded(form, size=(64, 48), seed=0, **options):
    image, file = Image.frombytes("RGB", size, Random(seed).randbytes(size[0] * size[1] * 3)), BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width, height, *, extra=b"", data=b"", kind=2, depth=8):
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + extra + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def hostile():
    """Yield name and bytes of each image."""
    random = Random(40)
    good = {form: encoded(form) for form in ("PNG", "JPEG", "WEBP")}
    good["progressive"] = encoded("JPEG", progressive=True)
    for form, data in good.items():
        for number in range(18):
            yield f"{form} cut {number}", data[: random.randrange(1, len(data))]
        for number in range(18):
            flipped = bytearray(data)
            for _ in range(8):
                flipped[random.randrange(len(data))] ^= 1 << random.randrange(8)
            yield f"{form} flipped {number}", bytes(flipped)
    starts = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"RIFF\xff\xff\x00\x00WEBPVP8 ", b"GIF89a", b"BM", b"II*\x00")
    for number in range(30):
        yield f"noise {number}", random.choice(starts) + random.randbytes(random.randrange(1, 4000))
    for side in (0, 1001, 4097, 20_000, 65_535, 100_000, 2**31 - 1, 2**32 - 1):
        yield f"png {side} wide", png(side, side, data=zlib.compress(b"\0" * 1000))
    rows = zlib.compress(b"\0" * (12_001 * 12_000), 9)
    yield "png of 12000 x 12000 zeros", png(12_000, 12_000, data=rows, kind=0)
    yield "png with 10 times its data", png(100, 100, data=zlib.compress(b"\0" * 10_000_000, 9), kind=0)
    text = zlib.compress(b"a" * 200_000_000, 9)
    yield (
        "png with a text bomb",
        png(8, 8, extra=chunk(b"zTXt", b"Comment\0\0" + text), data=zlib.compress(b"\0" * 200)),
    )
    yield "png with a profile bomb", png(8, 8, extra=chunk(b"iCCP", b"p\0\0" + text), data=zlib.compress(b"\0" * 200))
    yield "png with many chunks", png(8, 8, extra=chunk(b"teSt", b"") * 100_000, data=zlib.compress(b"\0" * 200))
    jpeg = encoded("JPEG", (900, 900), progressive=True)
    scan = jpeg.rindex(b"\xff\xda")
    yield "jpeg with 5000 scans", jpeg[:scan] + jpeg[scan : scan + 200] * 5000 + b"\xff\xd9"
    header = bytearray(good["JPEG"])
    size = header.index(b"\xff\xc0") + 5
    header[size : size + 4] = b"\xff\xff\xff\xff"
    yield "jpeg that claims 65535 x 65535", bytes(header)
    orientation = b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + random.randbytes(3000)
    yield (
        "jpeg with broken exif",
        b"\xff\xd8\xff\xe1" + struct.pack(">H", len(orientation) + 2) + orientation + good["JPEG"][2:],
    )
    for form in ("GIF", "BMP", "TIFF", "ICO", "PPM", "PDF", "EPS", "TGA", "PCX", "SGI"):
        yield f"a {form}", encoded(form)
    yield "svg", b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
    yield "html", b"<html><body>hello</body></html>"
    yield "empty", b""
    yield "one byte", b"\x89"
    yield "zeros", b"\0" * 100_000
    yield "too many bytes", good["PNG"] + b"\0" * 3_000_000
    frames = [Image.new("RGB", (100, 100), (i, 0, 0)) for i in range(50)]
    file = BytesIO()
    frames[0].save(file, "WEBP", save_all=True, append_images=frames[1:])
    yield "animated webp", file.getvalue()
    yield (
        "png with a compressed international text",
        png(8, 8, extra=chunk(b"iTXt", b"Comment\0\1\0\0\0" + text), data=zlib.compress(b"\0" * 200)),
    )
    frame_control = chunk(b"fcTL", struct.pack(">IIIIIHHBB", 0, 2**31 - 1, 2**31 - 1, 0, 0, 0, 0, 0, 0))
    control = chunk(b"acTL", struct.pack(">II", 2**31 - 1, 0)) + frame_control
    yield "png that claims 2 billion frames", png(8, 8, extra=control, data=zlib.compress(b"\0" * 200))
    yield from oddities_of_exif(good)
    yield "jpeg with 60000 segments", b"\xff\xd8" + b"\xff\xe5\0\2" * 60_000 + good["JPEG"][2:]
    profile = b"ICC_PROFILE\0\1\xff" + random.randbytes(200)
    yield "jpeg with 1 of 255 parts of a profile", with_segment(good["JPEG"], b"\xff\xe2", profile)
    pictures = b"MPF\0" + random.randbytes(300)
    yield "jpeg with broken further pictures", with_segment(good["JPEG"], b"\xff\xe2", pictures)
    yield from hostile_of_any_format(random)


def with_segment(jpeg, marker, data):
    return jpeg[:2] + marker + struct.pack(">H", len(data) + 2) + data + jpeg[2:]


def directory(entries, *, following=0):
    """A TIFF directory of (tag, type, count, value), as in EXIF."""
    body = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return struct.pack("<H", len(entries)) + body + struct.pack("<I", following)


def oddities_of_exif(good):
    """Yield images whose EXIF data are valid at first sight: orientations, types, counts and loops."""
    turned = (0x0112, 3, 1, 6)
    cases = {
        "orientation 0": [(0x0112, 3, 1, 0)],
        "orientation 9": [(0x0112, 3, 1, 9)],
        "orientation 65535": [(0x0112, 3, 1, 65535)],
        "an orientation of text": [(0x0112, 2, 4, 0x41414141)],
        "a rational orientation": [(0x0112, 5, 1, 8)],
        "an orientation of 2 billion values": [(0x0112, 3, 2**31 - 1, 8)],
        "an unknown type": [turned, (0x010E, 77, 1, 8)],
        "a directory in itself": [turned, (0x8769, 4, 1, 8)],
        "a location in itself": [turned, (0x8825, 4, 1, 8)],
        "a directory at the end of memory": [turned, (0x8769, 4, 1, 2**32 - 1)],
        "a text of 4 billion characters": [turned, (0x010E, 2, 2**32 - 1, 8)],
        "5000 equal tags": [turned] * 5000,
    }
    for name, entries in cases.items():
        exif = b"II*\0\x08\0\0\0" + directory(entries, following=8)
        if len(exif) < 60_000:
            yield f"jpeg exif with {name}", with_segment(good["JPEG"], b"\xff\xe1", b"Exif\0\0" + exif)
        yield f"png exif with {name}", png(8, 8, extra=chunk(b"eXIf", exif), data=zlib.compress(b"\0" * 200))


def hostile_of_any_format(random):
    """Yield images of the formats that must be allowed by name."""
    good = {"GIF": encoded("GIF"), "BMP": encoded("BMP"), "TIFF": encoded("TIFF", compression="tiff_deflate")}
    for form, data in good.items():
        for number in range(8):
            yield f"any {form} cut {number}", data[: random.randrange(1, len(data))]
            flipped = bytearray(data)
            for _ in range(8):
                flipped[random.randrange(min(len(data), 200))] ^= 1 << random.randrange(8)
            yield f"any {form} flipped {number}", bytes(flipped)
    block = struct.pack("<BHHHHB", 0x2C, 0, 0, 2, 2, 0) + b"\2\3\x84\x51\0\0"
    screen = b"GIF89a" + struct.pack("<HHBBB", 2, 2, 0x80, 0, 0) + bytes(6)
    yield "any gif with 60000 frames", screen + block * 60_000 + b";"
    yield (
        "any gif of 65535 x 65535",
        b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0x80, 0, 0) + bytes(6) + block + b";",
    )
    large = struct.pack("<BHHHHB", 0x2C, 0, 0, 13_000, 13_000, 0) + b"\2\3\x84\x51\0\0"
    yield "any gif with a frame larger than its screen", screen + large + b";"
    far = struct.pack("<BHHHHB", 0x2C, 12_000, 12_000, 2, 2, 0) + b"\2\3\x84\x51\0\0"
    yield "any gif with a frame outside of its screen", screen + far + b";"
    yield "any gif with an endless comment", screen + b"!\xfe" + (b"\xff" + b"a" * 255) * 5000
    for side in (0, -(2**31), 2**31 - 1, 30_000):
        info = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 8, 1, 0, 0, 0, 0, 0)
        yield f"any bmp {side} wide", b"BM" + struct.pack("<IHHI", 100, 0, 0, 54) + info + bytes(64)
    base = [(256, 4, 1, 100), (257, 4, 1, 100), (258, 3, 1, 8), (259, 3, 1, 8), (262, 3, 1, 1), (273, 4, 1, 400)]
    base += [(277, 3, 1, 1), (278, 4, 1, 100), (279, 4, 1, 1000)]
    rows = zlib.compress(b"\0" * 100_000_000, 9)
    cases = {
        "a strip of 100 MB": [*base[:-1], (279, 4, 1, len(rows))],
        "65535 samples per pixel": [each for each in base if each[0] != 277] + [(277, 3, 1, 65535)],
        "2 billion strips": [each for each in base if each[0] != 273] + [(273, 4, 2**31 - 1, 8)],
        "a text of 4 billion characters": [*base, (270, 2, 2**32 - 1, 8)],
        "a profile of 4 GB": [*base, (34675, 7, 2**32 - 1, 8)],
        "equal tags": base * 7000,
        "tiles of 2 billion pixels": [*base, (322, 4, 1, 2**31 - 1), (323, 4, 1, 2**31 - 1), (324, 4, 1, 400)],
        "100000 x 100000 pixels": [(256, 4, 1, 100_000), (257, 4, 1, 100_000), *base[2:]],
        "0 x 0 pixels": [(256, 4, 1, 0), (257, 4, 1, 0), *base[2:]],
        "2 billion rows per strip": [each for each in base if each[0] != 278] + [(278, 4, 1, 2**31 - 1)],
        "a map of colors of 4 billion values": [*base, (320, 3, 2**32 - 1, 8)],
    }
    for name, entries in cases.items():
        start = b"II*\0\x08\0\0\0" + directory(sorted(entries)[:65535], following=8)
        yield f"any tiff with {name}", start.ljust(400, b"\0") + rows
    canvas = struct.pack("<I", 16_383)[:3] * 2
    body = b"WEBPVP8X" + struct.pack("<I", 10) + b"\x02\0\0\0" + canvas
    yield "any webp of 16384 x 16384", b"RIFF" + struct.pack("<I", len(body)) + body


def decide(folder):
    """Decode all files of a folder, and print what happened as JSON."""
    decode_image(encoded("PNG"), LIMITS)
    results, before = [], peak_bytes()
    for name, data in ((file.name, file.read_bytes()) for file in sorted(Path(folder).iterdir())):
        start = time.process_time()
        try:
            size = decode_image(data, ANY if name.startswith("any ") else LIMITS).size
            outcome = f"{size[0]} x {size[1]}"
        except ImageError as error:
            outcome = f"{type(error).__name__}: {error.message}"
        results.append((name, outcome, time.process_time() - start))
    print(json.dumps({"results": results, "growth": peak_bytes() - before}))


def peak_bytes():
    """Peak resident memory. `ru_maxrss` would include that of the parent process."""
    line = next(each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


@pytest.fixture(scope="module")
def decided(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    for name, data in hostile():
        (folder / name).write_bytes(data)
    # In a process of its own, whose peak memory is not that of making these images.
    command = [sys.executable, "-c", f"import test_hostile; test_hostile.decide({str(folder)!r})"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=240, check=True)
    return json.loads(done.stdout)


def test_no_image_takes_long_or_much_memory(decided):
    assert len(decided["results"]) >= 300
    assert max(seconds for _, _, seconds in decided["results"]) < MAX_SECONDS
    assert decided["growth"] < MAX_GROWTH_BYTES


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("png 4097 wide", "DecompressionBomb: the image has 4097 x 4097 pixels, at most 1,000,000 are allowed"),
        ("png 100000 wide", "DecompressionBomb: the image has too many pixels"),
        ("png of 12000 x 12000 zeros", "DecompressionBomb: the image has 12000 x 12000"),
        ("jpeg that claims 65535 x 65535", "DecompressionBomb: the image has"),
        ("jpeg with 5000 scans", "DecompressionBomb: the JPEG image has 50"),
        ("png with many chunks", "DecompressionBomb: the PNG image has more than 20,000 chunks"),
        ("png with a text bomb", "ImageError: the image cannot be decoded"),
        ("a TIFF", "ImageError: the image is not of the formats png, jpeg, webp"),
        ("a GIF", "ImageError: the image is not of the formats"),
        ("svg", "ImageError: the image is not of the formats"),
        ("too many bytes", "ImageError: the image has 3,0"),
        ("animated webp", "100 x 100"),
        ("png with a compressed international text", "ImageError: the image cannot be decoded"),
        ("jpeg exif with a directory in itself", "48 x 64"),
        ("any gif with 60000 frames", "2 x 2"),
        ("any gif of 65535 x 65535", "DecompressionBomb: the image has"),
        ("any gif with a frame larger than its screen", "DecompressionBomb: the image has 13000 x 13000"),
        ("any tiff with 100000 x 100000 pixels", "DecompressionBomb: the image has"),
    ],
)
def test_the_outcome_names_the_reason(decided, name, outcome):
    assert dict(each[:2] for each in decided["results"])[name].startswith(outcome)


def test_a_bomb_is_an_error_of_its_own():
    with pytest.raises(DecompressionBomb, match=r"(?s)4097 x 4097.*raise limits.max_pixels"):
        decode_image(png(4097, 4097, data=zlib.compress(b"")))

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


def decide(folder):
    """Decode all files of a folder, and print what happened as JSON."""
    decode_image(encoded("PNG"), LIMITS)
    results, before = [], peak_bytes()
    for name, data in ((file.name, file.read_bytes()) for file in sorted(Path(folder).iterdir())):
        start = time.process_time()
        try:
            size = decode_image(data, LIMITS).size
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
    assert len(decided["results"]) >= 200
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
    ],
)
def test_the_outcome_names_the_reason(decided, name, outcome):
    assert dict(each[:2] for each in decided["results"])[name].startswith(outcome)


def test_a_bomb_is_an_error_of_its_own():
    with pytest.raises(DecompressionBomb, match=r"(?s)4097 x 4097.*raise limits.max_pixels"):
        decode_image(png(4097, 4097, data=zlib.compress(b"")))

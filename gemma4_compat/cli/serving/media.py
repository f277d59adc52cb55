"""Images and sounds of a request: what is in it, or at an address if that is allowed; never a file of this machine.

transformers would open a path, and follow any redirect. It gets decoded images and sounds only.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import http.client
import importlib.util
import io
import ipaddress
import re
import socket
import time
import urllib.parse
import urllib.request
import wave
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from gemma4_compat.cli.serving import requests
from gemma4_compat.cli.serving.requests import Refused

#: What PIL may read: other formats start programs, or are large in a few bytes.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_PIXELS = 40_000_000
#: How WAV, FLAC, OGG and MP3 begin. FFmpeg also reads playlists, whose entries are files and addresses.
_AUDIO = re.compile(rb"RIFF....WAVE|fLaC|OggS|\xff[\xe0-\xff]", re.DOTALL)
_SECONDS = 15.0
_TRIED = 3  # addresses of a machine, each for so long at most
_CHUNK = 1 << 16
#: The longest sound. The model hears its first 30 seconds; a FLAC file of a few bytes may unpack to days of silence.
_MINUTES = 10


@dataclass(frozen=True)
class Limits:
    """What a request may bring.

    Attributes:
        http: public addresses are fetched.
        hosts: names or addresses of machines from which it is also fetched, be they private.
        size: bytes of one image or sound.
        count: of them in one request.
    """

    http: bool = False
    hosts: tuple[str, ...] = ()
    size: int = 20 << 20
    count: int = 16


def messages(asked: requests.Chat, limits: Limits, *, pictures: bool, rate: int | None) -> list[dict[str, Any]]:
    """The messages of a request as transformers' server takes them, with images and sounds decoded.

    Args:
        asked: the request.
        limits: what it may bring.
        pictures: the model sees.
        rate: the samples per second that the model hears; None: it hears nothing.
    """
    found: list[dict[str, Any]] = msgspec.to_builtins(asked.messages)
    parts = [part for message in found if isinstance(message.get("content"), list) for part in message["content"]]
    shown = [part for part in parts if part["type"] != "text"]
    if len(shown) > limits.count:
        raise Refused(400, f"The request has {len(shown)} images and sounds, and {limits.count} are the most.")
    for part in shown:
        if part["type"] == "image_url":
            if not pictures:
                raise Refused(400, "This server has no image processor, or its model sees nothing: send text.")
            part["image_url"] = _picture(_content(part["image_url"]["url"], limits))
        else:
            if rate is None:
                raise Refused(400, "This server has no audio processor, or its model hears nothing: send text.")
            given = part.pop("audio_url", None)
            content = (
                _decoded(part["input_audio"]["data"], limits) if given is None else _content(given["url"], limits)
            )
            part |= {"type": "input_audio", "input_audio": _sound(content, rate)}
    for message in found:
        message["role"] = "system" if message["role"] == "developer" else message["role"]
        for call in message.get("tool_calls", ()):
            try:
                msgspec.json.decode(call["function"]["arguments"], type=dict[str, Any])
            except msgspec.DecodeError as error:
                raise Refused(400, f"The arguments of a tool call are no JSON object: {error}.") from None
    return found


def _content(address: str, limits: Limits) -> bytes:
    """The bytes at an address."""
    scheme, colon, rest = address.partition(":")
    if colon and scheme.lower() == "data":
        head, comma, data = rest.partition(",")
        if comma and head.lower().endswith(";base64"):
            return _decoded(data, limits)
        raise Refused(400, "An address with data: is in base64: data:image/png;base64,...")
    if colon and scheme.lower() in ("http", "https"):
        if limits.http or limits.hosts:
            return _fetched(address, limits)
        raise Refused(400, "Addresses on other machines are not fetched here (serve --allow-http); send data:.")
    raise Refused(400, "Only addresses with data: are read, and with http: or https: where serve has --allow-http.")


def _decoded(data: str, limits: Limits) -> bytes:
    if len(data) * 3 // 4 > limits.size:
        raise Refused(413, f"An image or a sound has more than {limits.size >> 20} MiB.")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise Refused(400, "An image or a sound is not in base64.") from None


class _Redirects(urllib.request.HTTPRedirectHandler):
    max_redirections = 3


class _Allowed(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Connects to allowed machines only, by the addresses that it has checked: a name may change its meaning."""

    def __init__(self, limits: Limits) -> None:
        super().__init__()
        self._limits = limits

    def do_open(self, http_class: Any, req: urllib.request.Request, **options: Any) -> Any:
        proxied = req.has_proxy() or getattr(req, "_tunnel_host", None) is not None
        if proxied:  # it looks the name up
            name = urllib.parse.urlsplit(req.full_url).hostname or ""
            self._refuse_others(name, [name])

        def connect(address: tuple[str, int], *arguments: Any) -> socket.socket:
            if proxied:
                return socket.create_connection(address, *arguments)
            name, port = address
            found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[:_TRIED]
            *others, last = (str(each[4][0]) for each in found)
            self._refuse_others(name, [*others, last])
            for each in others:
                with contextlib.suppress(OSError):
                    return socket.create_connection((each, port), *arguments)
            return socket.create_connection((last, port), *arguments)

        def made(*arguments: Any, **keywords: Any) -> Any:
            connection = http_class(*arguments, **keywords)
            connection._create_connection = connect
            return connection

        return super().do_open(made, req, **options)

    def _refuse_others(self, name: str, addresses: Iterable[str]) -> None:
        if name.lower() in self._limits.hosts:
            return
        if not self._limits.http:
            raise Refused(400, f"Nothing is fetched from {name[:200]} here (serve --media-host).")
        if not all(map(_is_public, addresses)):
            raise Refused(400, f"{name[:200]} is not a public machine; nothing is fetched there (serve --media-host).")


def _is_public(address: str) -> bool:
    """Whether it is not one of this machine, of its network, or of a cloud's metadata."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:  # a name, for a proxy
        return address.rstrip(".") != "localhost"
    return bool((getattr(found, "ipv4_mapped", None) or found).is_global)


def _fetched(address: str, limits: Limits) -> bytes:
    """What a machine answers, within a limit of bytes and of time; redirects stay http."""
    opener = urllib.request.OpenerDirector()
    # Without one for file: or ftp:, so no redirect leads there.
    for handler in (
        urllib.request.ProxyHandler(),
        _Allowed(limits),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        _Redirects(),
    ):
        opener.add_handler(handler)
    until = time.monotonic() + _SECONDS
    try:
        with opener.open(address, timeout=_SECONDS) as answer:
            return b"".join(_chunks(answer, until, limits))
    except (OSError, ValueError, AttributeError, TypeError, http.client.HTTPException) as error:
        raise Refused(400, f"An address could not be fetched: {type(error).__name__}.") from None


def _chunks(answer: Any, until: float, limits: Limits) -> Iterator[bytes]:
    size = 0
    while chunk := answer.read1(_CHUNK):
        size += len(chunk)
        if size > limits.size:
            raise Refused(413, f"An image or a sound has more than {limits.size >> 20} MiB.")
        if time.monotonic() > until:
            raise Refused(400, f"An address did not answer within {_SECONDS:.0f} seconds.")
        yield chunk


def _picture(content: bytes) -> Any:
    from PIL import Image, UnidentifiedImageError

    try:
        picture = Image.open(io.BytesIO(content), formats=_FORMATS)
        if picture.width * picture.height > _PIXELS:
            raise Refused(400, f"An image has {picture.width} x {picture.height} pixels; {_PIXELS} are the most.")
        picture.load()
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        raise Refused(400, f"An image could not be read; it may be {', '.join(_FORMATS)}.") from None
    return picture


def _sound(content: bytes, rate: int) -> Any:
    """Samples, float32: of plain WAV files without another library."""
    import numpy

    try:
        with wave.open(io.BytesIO(content)) as file:
            if (file.getsampwidth(), file.getframerate()) == (2, rate):
                samples = numpy.frombuffer(file.readframes(file.getnframes()), "<i2").astype("float32") / 32768
                return samples.reshape(-1, file.getnchannels()).mean(axis=1)
    except (wave.Error, EOFError, RuntimeError, ValueError):
        pass  # another format: transformers reads it, where a library for that is installed
    if not _AUDIO.match(content, _after_tags(content)):
        raise Refused(400, "A sound could not be read; it may be WAV, MP3, FLAC or OGG.")
    if (seconds := _seconds(content)) > 60 * _MINUTES:
        raise Refused(400, f"A sound lasts {seconds:,.0f} seconds; {60 * _MINUTES} are the most.")
    from transformers.audio_utils import load_audio

    try:
        return load_audio("data:audio/wav;base64," + base64.b64encode(content).decode(), sampling_rate=rate)
    except (ImportError, RuntimeError, ValueError, OSError) as error:
        sentence = str(error).strip().partition("\n")[0]
        raise Refused(400, f"A sound could not be read ({type(error).__name__}): {sentence[:200]}") from None


def _seconds(content: bytes) -> float:
    """How long a sound is, by its header, for which soundfile makes room; 0 without soundfile."""
    if importlib.util.find_spec("soundfile") is None:
        return 0.0
    import soundfile

    try:
        return float(soundfile.info(io.BytesIO(content)).duration)
    except (RuntimeError, TypeError, ValueError):
        return 0.0  # no sound, which the decoder says


def _after_tags(content: bytes) -> int:
    """Where a sound begins, after ID3 tags."""
    start = 0
    while content[start : start + 3] == b"ID3" and len(content) >= start + 10:
        size = 0
        for byte in content[start + 6 : start + 10]:
            size = size << 7 | byte & 0x7F
        start += 10 + size
    return start

"""Pictures that people upload to the web page: a private folder, read and emptied by nobody else.

They lie there until they were looked at; files that were never used go after `KEPT_UNUSED` seconds, and the folder
itself with the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import threading
import time
from abc import ABCMeta
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fscil.errors import UserError
from fscil.serving.gate import Scope, body_bytes, visitor
from fscil.serving.page_parts import sentence

DELETED_AFTER = 1.0  # seconds from a file's use to its end
KEPT_UNUSED = 900  # seconds that an uploaded file waits to be used
PER_VISITOR = 300_000_000  # bytes that wait at a time, of one address
IN_ALL = 1_000_000_000  # and of all
UPLOAD = re.compile(r"/gradio_api/upload/?")


class Uploads:
    """The folder that Gradio puts uploaded files into. What is read and deleted here is always inside it.

    A browser names its files by their paths on this machine, and Gradio does not check those of a mounted page: without
    this, anybody could have any file of the machine read, and deleted after use.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = os.path.realpath(folder)
        self.owners: dict[str, str] = {}  # uploaded file -> visitor
        self.arriving: Counter[str] = Counter()  # bytes on their way, by visitor

    def check(self, path: str | None) -> str:
        """The real path of an uploaded file; anything else is refused."""
        real = os.path.realpath(path or "")
        if not os.path.isabs(path or "") or os.path.commonpath((self.folder, real)) != self.folder:
            raise UserError("only uploaded files can be used.")
        return real

    def find(self, paths: Sequence[str]) -> list[Path]:
        """Uploaded files that are there; they are read when their turn comes, so that few are in memory at a time."""
        files = [Path(self.check(path)) for path in paths]
        if not all(file.is_file() for file in files):
            raise UserError("the pictures have waited too long and were deleted; please add them again.")
        return files

    def discard(self, paths: Sequence[str]) -> None:
        """Deletes files in a moment: the browser may be about to show them. Files of the same name added since stay."""

        def delete() -> None:
            for path, before in seen:
                with contextlib.suppress(OSError):
                    if os.stat(path).st_ino == before:
                        os.unlink(path)

        seen = [(path, os.stat(path).st_ino) for path in map(self.check, paths) if os.path.isfile(path)]
        timer = threading.Timer(DELETED_AFTER, delete)
        timer.daemon = True
        timer.start()

    def room_for(self, visitor: str, size: int) -> bool:
        """Whether so much more may lie here until it is used: of one visitor, and of all."""
        used = Counter(self.arriving)
        for path, owner in list(self.owners.items()):
            try:
                used[owner] += os.stat(path).st_size
            except OSError:  # used, or swept
                self.owners.pop(path, None)
        return used[visitor] + size <= PER_VISITOR and sum(used.values()) + size <= IN_ALL

    def noting(self, app: Callable) -> Callable:
        """ASGI: notes who uploaded what, from Gradio's answer: the paths of the files."""

        async def noted(scope: Scope, receive: Callable, send: Callable) -> None:
            if scope["type"] != "http" or not UPLOAD.fullmatch(scope["path"]):
                return await app(scope, receive, send)
            who, size, answer = visitor(scope), body_bytes(scope) or 0, bytearray()

            async def reading(message: Any) -> None:
                answer.extend(message.get("body", b""))
                await send(message)

            self.arriving[who] += size
            try:
                await app(scope, receive, reading)
            finally:
                self.arriving[who] -= size
                with contextlib.suppress(ValueError):  # a refusal in words
                    paths = json.loads(answer)
                    self.owners |= {path: who for path in paths if isinstance(path, str)}

        return noted

    def sweep(self, age: float) -> None:
        """Deletes files and empty folders that have lain there for more than `age` seconds."""
        for where, folders, files in os.walk(self.folder, topdown=False):  # passes over what others delete meanwhile
            for delete, names in ((os.unlink, files), (os.rmdir, folders)):
                for path in (os.path.join(where, name) for name in names):
                    with contextlib.suppress(OSError):
                        if time.time() - os.stat(path).st_mtime > age:
                            delete(path)

    def only(self, component: type) -> type:
        """A kind of Gradio component that hands over paths of uploaded files and nothing else.

        As it comes, it would open pictures itself, without our limits, copy the files, and fetch addresses on other
        servers for whoever asks.
        """
        from gradio import Error

        async def stay(_: Any, path: str) -> str:
            return path

        def paths(_: Any, payload: Any) -> Any:
            try:
                if hasattr(payload, "root"):  # of a gallery, whose items hold a picture, or of a list of files
                    return [self.check(getattr(getattr(item, "image", item), "path", None)) for item in payload.root]
                return None if payload is None else self.check(payload.path)
            except UserError as error:
                raise Error(sentence(str(error)), print_exception=False) from None

        def plain_class(meta: type, *parts: Any) -> type:
            return ABCMeta.__new__(meta, *parts)  # Gradio's own would write a stub beside this file

        meta = type("Meta", (type(component),), {"__new__": plain_class})
        changes = {"preprocess": paths, "async_move_resource_to_block_cache": stay, "is_template": True}
        return meta(component.__name__, (component,), changes)


@contextlib.contextmanager
def upload_folder() -> Iterator[Path]:
    """A private folder for everything that Gradio writes, swept while in use and gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="fscil-app-", ignore_cleanup_errors=True) as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder
        ended = threading.Event()

        def keep_swept() -> None:
            while not ended.wait(60):
                Uploads(folder).sweep(KEPT_UNUSED)

        threading.Thread(target=keep_swept, daemon=True).start()
        try:
            yield Path(folder)
        finally:
            ended.set()

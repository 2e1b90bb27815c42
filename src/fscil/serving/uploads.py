"""Pictures that people upload to the web page: a private folder, read and emptied by nobody else.

They lie there until they were looked at; files that were never used go after `KEPT_UNUSED` seconds, and the folder
itself with the process.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from abc import ABCMeta
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fscil.errors import UserError
from fscil.serving.page_parts import sentence

DELETED_AFTER = 1.0  # seconds from a file's use to its end
KEPT_UNUSED = 900  # seconds that an uploaded file waits to be used


class Uploads:
    """The folder that Gradio puts uploaded files into. What is read and deleted here is always inside it.

    A browser names its files by their paths on this machine, and Gradio does not check those of a mounted page: without
    this, anybody could have any file of the machine read, and deleted after use.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = os.path.realpath(folder)

    def check(self, path: str | None) -> str:
        """The real path of an uploaded file; anything else is refused."""
        real = os.path.realpath(path or "")
        if not os.path.isabs(path or "") or os.path.commonpath((self.folder, real)) != self.folder:
            raise UserError("only uploaded files can be used.")
        return real

    def take(self, paths: Sequence[str]) -> list[bytes]:
        try:
            return [Path(self.check(path)).read_bytes() for path in paths]
        except (FileNotFoundError, IsADirectoryError):
            raise UserError("the pictures have waited too long and were deleted; please add them again.") from None

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
                if hasattr(payload, "root"):
                    return [self.check(getattr(item, "image", None) and item.image.path) for item in payload.root]
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

"""The bytes that processes copy: by `memcpy` and `memmove`, and by the kernel for their sockets.

A library in front of libc (`LD_PRELOAD`) adds up the bytes of all processes that start within `counted`, in a
file that they map. Copies below 256 bytes, such as those of headers, do not count. Needs Linux and `gcc`.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>
enum { LEAST = 256 };
static unsigned long long before[2], *copied = before;
static void *(*move)(void *, const void *, size_t);
#define NEXT(name) ({ static __typeof__(name) *next; \
    if (!next) next = (__typeof__(name) *)dlsym(RTLD_NEXT, #name); next; })
static void add(int kind, long long bytes) {
    if (bytes >= LEAST) __atomic_fetch_add(&copied[kind], bytes, __ATOMIC_RELAXED);
}
__attribute__((constructor)) static void start(void) {
    int file = open(getenv("COPIED_BYTES"), O_RDWR);
    void *page = mmap(NULL, sizeof before, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    move = (void *(*)(void *, const void *, size_t))dlsym(RTLD_NEXT, "memmove");
    if (page != MAP_FAILED) copied = page;
}
static void *moved(void *to, const void *from, size_t count) {
    add(0, count);
    if (move) return move(to, from, count);
    unsigned char *a = to;  /* before the constructor: one byte after the other, from the safe end */
    const unsigned char *b = from;
    if (a < b) for (size_t i = 0; i < count; i++) a[i] = b[i];
    else while (count--) a[count] = b[count];
    return to;
}
void *memcpy(void *to, const void *from, size_t count) { return moved(to, from, count); }
void *memmove(void *to, const void *from, size_t count) { return moved(to, from, count); }
void *__memcpy_chk(void *to, const void *from, size_t count, size_t room) { return moved(to, from, count); }
void *__memmove_chk(void *to, const void *from, size_t count, size_t room) { return moved(to, from, count); }
#define COUNTED(call) ({ ssize_t done = (call); add(1, done); done; })
ssize_t read(int f, void *to, size_t n) { return COUNTED(NEXT(read)(f, to, n)); }
ssize_t write(int f, const void *from, size_t n) { return COUNTED(NEXT(write)(f, from, n)); }
ssize_t readv(int f, const struct iovec *v, int n) { return COUNTED(NEXT(readv)(f, v, n)); }
ssize_t writev(int f, const struct iovec *v, int n) { return COUNTED(NEXT(writev)(f, v, n)); }
ssize_t recv(int f, void *to, size_t n, int how) { return COUNTED(NEXT(recv)(f, to, n, how)); }
ssize_t send(int f, const void *from, size_t n, int how) { return COUNTED(NEXT(send)(f, from, n, how)); }
ssize_t recvmsg(int f, struct msghdr *m, int how) { return COUNTED(NEXT(recvmsg)(f, m, how)); }
ssize_t sendmsg(int f, const struct msghdr *m, int how) { return COUNTED(NEXT(sendmsg)(f, m, how)); }
ssize_t __read_chk(int f, void *to, size_t n, size_t room) { return read(f, to, n); }
ssize_t __recv_chk(int f, void *to, size_t n, size_t room, int how) { return recv(f, to, n, how); }
"""

COUNTS = "COPIED_BYTES"
"""Variable with the name of the file."""

FLAGS = ("-shared", "-fPIC", "-O2", "-fno-builtin", "-fno-tree-loop-distribute-patterns")


def bytes_in(counts: Path) -> NDArray[np.uint64]:
    """Return the bytes in the file of `counted`: those of the processes, and those of the kernel."""
    return np.fromfile(counts, np.uint64)


@contextmanager
def counted(folder: Path) -> Iterator[Path]:
    """Count the copies of the processes that start within the block.

    Yields:
        The file of the counts; see `bytes_in`.

    Raises:
        SystemExit: `gcc` is missing or failed.
    """
    source, library, file = folder / "copied.c", folder / "copied.so", folder / "counts"
    source.write_text(SHIM)
    try:
        subprocess.run(
            ["gcc", *FLAGS, "-o", library, source, "-ldl"], check=True, capture_output=True, text=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"counting copies needs gcc: {getattr(error, 'stderr', '') or error}") from None
    np.zeros(2, np.uint64).tofile(file)
    before = os.environ.get("LD_PRELOAD")
    os.environ |= {"LD_PRELOAD": str(library), COUNTS: str(file)}
    try:
        yield file
    finally:
        del os.environ["LD_PRELOAD"], os.environ[COUNTS]
        if before is not None:
            os.environ["LD_PRELOAD"] = before

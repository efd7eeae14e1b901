//! Bytes between the region and a socket, by system call on raw addresses: no copy of ours, no reference into the region.

use super::Region;
use std::io::{Error, ErrorKind, Result};
use std::os::fd::{AsRawFd, BorrowedFd};

impl Region {
    /// Sends up to `len` bytes at `offset` to a stream socket, without blocking and without raising `SIGPIPE`; how many went.
    ///
    /// # Panics
    /// If the range leaves the region.
    pub(crate) fn send_to(&self, socket: BorrowedFd<'_>, offset: usize, len: usize) -> Result<usize> {
        let from = self.at(offset, len);
        // SAFETY: `at` checked that the range lies within the mapping; the kernel only reads it.
        let sent = unsafe { libc::send(socket.as_raw_fd(), from.cast(), len, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) };
        usize::try_from(sent).map_err(|_| Error::last_os_error())
    }

    /// Receives up to `len` bytes from a stream socket to `offset`, without blocking. End of stream is an error.
    ///
    /// # Panics
    /// If the range leaves the region.
    pub(crate) fn receive_from(&self, socket: BorrowedFd<'_>, offset: usize, len: usize) -> Result<usize> {
        let to = self.at(offset, len);
        // SAFETY: `at` checked that the range lies within the mapping, to which no reference exists anywhere.
        let received = unsafe { libc::recv(socket.as_raw_fd(), to.cast(), len, libc::MSG_DONTWAIT) };
        match usize::try_from(received) {
            Ok(0) if len > 0 => Err(ErrorKind::UnexpectedEof.into()),
            Ok(received) => Ok(received),
            Err(_) => Err(Error::last_os_error()),
        }
    }
}

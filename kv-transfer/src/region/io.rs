//! Bytes between the region and a socket, by system call on raw addresses: no copy of ours, no reference into the region.

use super::Region;
use std::io::{Error, ErrorKind, Result};
use std::mem::zeroed;
use std::os::fd::{AsRawFd, BorrowedFd};

impl Region {
    /// Sends `head`, then up to `len` bytes at `offset`, to a stream socket; how many bytes went, the head's included. Neither blocks
    /// nor raises `SIGPIPE`.
    ///
    /// # Panics
    /// If the range leaves the region.
    pub(crate) fn send_to(&self, socket: BorrowedFd<'_>, head: &[u8], offset: usize, len: usize) -> Result<usize> {
        let body = libc::iovec { iov_base: self.at(offset, len).cast(), iov_len: len };
        let head = libc::iovec { iov_base: head.as_ptr().cast_mut().cast(), iov_len: head.len() };
        let mut parts = [head, body];
        // SAFETY: all fields of `msghdr` are numbers and pointers, for which zero is a value.
        let mut message: libc::msghdr = unsafe { zeroed() };
        message.msg_iov = parts.as_mut_ptr();
        message.msg_iovlen = parts.len() as _;
        // SAFETY: the kernel only reads, and both parts stay valid over the call: the head is borrowed, and `at` checked that the body
        // lies within the mapping.
        let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) };
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

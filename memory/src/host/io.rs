//! Moves bytes between a host pool and a socket by system calls on raw addresses, without an extra copy and without a reference into the
//! pool.

use super::HostPool;
use std::io::{Error, ErrorKind, Result};
use std::mem::zeroed;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Most parts of one send, well below the system's `IOV_MAX` of 1,024.
pub const PARTS_MAX: usize = 128;

/// Bytes for a socket to send: the sender's own, or the pool's.
#[allow(missing_docs, reason = "the names of fields and variants say it")]
#[derive(Clone, Copy, Debug)]
pub enum Part<'a> {
    Own(&'a [u8]),
    Pool { offset: usize, len: usize },
}

impl Part<'_> {
    /// Its bytes.
    pub const fn len(&self) -> usize {
        match self {
            Self::Own(bytes) => bytes.len(),
            Self::Pool { len, .. } => *len,
        }
    }

    /// Whether it has none.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl HostPool {
    /// Sends up to [`PARTS_MAX`] parts, in order, to a stream socket and returns the number of bytes sent. Neither blocks nor raises
    /// `SIGPIPE`.
    ///
    /// # Panics
    /// If a part is not within the pool.
    pub fn send_parts(&self, socket: BorrowedFd<'_>, parts: &[Part<'_>]) -> Result<usize> {
        let vector = |part: &Part<'_>| match part {
            Part::Own(bytes) => libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() },
            Part::Pool { offset, len } => libc::iovec { iov_base: self.at(*offset, *len).cast(), iov_len: *len },
        };
        let mut vectors: Vec<libc::iovec> = parts.iter().take(PARTS_MAX).map(vector).collect();
        // SAFETY: all fields of `msghdr` are numbers and pointers, for which zero is a value.
        let mut message: libc::msghdr = unsafe { zeroed() };
        message.msg_iov = vectors.as_mut_ptr();
        message.msg_iovlen = vectors.len() as _;
        // SAFETY: the kernel only reads, and all parts stay valid over the call: own bytes are borrowed, and `at` checked that the others
        // lie within the mapping.
        let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) };
        usize::try_from(sent).map_err(|_| Error::last_os_error())
    }

    /// Receives from a stream socket without blocking: up to `len` bytes to `offset`, and the following bytes to `rest`. End of stream is
    /// an error.
    ///
    /// # Panics
    /// If the range is not within the pool.
    pub fn receive_from(&self, socket: BorrowedFd<'_>, offset: usize, len: usize, rest: &mut [u8]) -> Result<usize> {
        let body = libc::iovec { iov_base: self.at(offset, len).cast(), iov_len: len };
        let behind = libc::iovec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() };
        let mut vectors = [body, behind];
        // SAFETY: all fields of `msghdr` are numbers and pointers, for which zero is a value.
        let mut message: libc::msghdr = unsafe { zeroed() };
        message.msg_iov = vectors.as_mut_ptr();
        message.msg_iovlen = vectors.len() as _;
        // SAFETY: `at` checked that the range lies within the mapping, to which no reference exists anywhere; `rest` is borrowed
        // exclusively.
        let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, libc::MSG_DONTWAIT) };
        match usize::try_from(received) {
            Ok(0) if len + rest.len() > 0 => Err(ErrorKind::UnexpectedEof.into()),
            Ok(received) => Ok(received),
            Err(_) => Err(Error::last_os_error()),
        }
    }
}

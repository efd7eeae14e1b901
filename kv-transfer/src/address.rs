//! The address at which peers reach an instance's data plane, in the bytes that a membership record carries.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::SocketAddr;

/// Published address of a transfer service. Only the transports interpret it.
#[derive(Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Vec<u8>", into = "Vec<u8>")]
pub enum TransferAddress {
    /// Socket of the control channel of the UCX transport.
    Ucx(SocketAddr),
    /// Socket of the TCP transport.
    Tcp(SocketAddr),
}

/// The bytes do not encode an address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} bytes are not a transfer address")]
pub struct AddressError(usize);

impl TransferAddress {
    /// Longest accepted address: a socket of IPv6, in text.
    pub const BYTES_MAX: usize = 64;

    /// The bytes that [`TransferAddress::from_bytes`] takes.
    pub fn to_bytes(&self) -> Vec<u8> {
        match self {
            Self::Ucx(socket) => format!("u{socket}").into_bytes(),
            Self::Tcp(socket) => format!("t{socket}").into_bytes(),
        }
    }

    /// Parses the bytes of a record.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, AddressError> {
        let error = AddressError(bytes.len());
        if bytes.len() > Self::BYTES_MAX {
            return Err(error);
        }
        let (kind, text) = bytes.split_first().ok_or(error.clone())?;
        let socket = std::str::from_utf8(text).ok().and_then(|text| text.parse().ok()).ok_or(error.clone())?;
        match kind {
            b'u' => Ok(Self::Ucx(socket)),
            b't' => Ok(Self::Tcp(socket)),
            _ => Err(error),
        }
    }

    /// Name of the transport: `ucx` or `tcp`.
    pub const fn transport(&self) -> &'static str {
        match self {
            Self::Ucx(_) => "ucx",
            Self::Tcp(_) => "tcp",
        }
    }
}

impl TryFrom<Vec<u8>> for TransferAddress {
    type Error = AddressError;
    fn try_from(bytes: Vec<u8>) -> Result<Self, AddressError> {
        Self::from_bytes(&bytes)
    }
}

impl From<TransferAddress> for Vec<u8> {
    fn from(address: TransferAddress) -> Self {
        address.to_bytes()
    }
}

impl fmt::Display for TransferAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ucx(socket) => write!(f, "ucx:{socket}"),
            Self::Tcp(socket) => write!(f, "tcp:{socket}"),
        }
    }
}

impl fmt::Debug for TransferAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_round_trip_and_garbage_is_refused() {
        for address in
            [TransferAddress::Ucx("10.0.0.1:7".parse().unwrap()), TransferAddress::Tcp("[::1]:9".parse().unwrap())]
        {
            assert_eq!(TransferAddress::from_bytes(&address.to_bytes()), Ok(address));
        }
        for bad in [b"".as_slice(), b"u", b"u\x01\x02", b"t1.2.3.4", b"x1.2.3.4:5", &[b'u'; 17 << 10]] {
            assert!(TransferAddress::from_bytes(bad).is_err());
        }
    }
}

//! Where peers reach an instance's data plane: the bytes that a membership record carries.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::SocketAddr;

/// Address of a transfer service, as published. Opaque to everybody but the transports.
#[derive(Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Vec<u8>", into = "Vec<u8>")]
pub enum TransferAddress {
    /// UCX worker address.
    Ucx(Vec<u8>),
    /// Socket of the plain TCP transport.
    Tcp(SocketAddr),
}

/// Bytes that are no address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} bytes are no transfer address")]
pub struct AddressError(usize);

impl TransferAddress {
    /// Longest accepted address: UCX worker addresses grow with the number of devices, a few hundred bytes each.
    pub const BYTES_MAX: usize = 16 << 10;

    /// The bytes that [`TransferAddress::from_bytes`] takes.
    pub fn to_bytes(&self) -> Vec<u8> {
        match self {
            Self::Ucx(worker) => [b"u".as_slice(), worker].concat(),
            Self::Tcp(socket) => format!("t{socket}").into_bytes(),
        }
    }

    /// Parses the bytes of a record.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, AddressError> {
        let error = AddressError(bytes.len());
        if bytes.len() > Self::BYTES_MAX {
            return Err(error);
        }
        match bytes.split_first() {
            Some((b'u', worker)) if !worker.is_empty() => Ok(Self::Ucx(worker.to_vec())),
            Some((b't', text)) => {
                std::str::from_utf8(text).ok().and_then(|t| t.parse().ok()).map(Self::Tcp).ok_or(error)
            }
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
            Self::Ucx(worker) => write!(f, "ucx:{} bytes", worker.len()),
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
        for address in [TransferAddress::Ucx(vec![1, 2, 3]), TransferAddress::Tcp("[::1]:9".parse().unwrap())] {
            assert_eq!(TransferAddress::from_bytes(&address.to_bytes()), Ok(address));
        }
        for bad in [b"".as_slice(), b"u", b"t1.2.3.4", b"x", &[b'u'; 17 << 10]] {
            assert!(TransferAddress::from_bytes(bad).is_err());
        }
    }
}

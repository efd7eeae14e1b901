//! The header of every active message: which connection it is on, and its place there.

use crate::ucx::HEADER_BYTES_MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// First message of whoever connects; its body is the address of the worker that it keeps for this connection.
    Attach,
    /// The answer, with the like.
    Attached,
    /// A control message of the service, in sequence.
    Data,
    /// The sender is alive.
    Ping,
    /// The sender closes the connection.
    Bye,
    /// Asks for [`Kind::Flushed`] of the same number once as many writes as the body says have come.
    Flush,
    Flushed,
}

const KINDS: [Kind; 7] = [Kind::Attach, Kind::Attached, Kind::Data, Kind::Ping, Kind::Bye, Kind::Flush, Kind::Flushed];
const MAGIC: u8 = 0xbb;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub kind: Kind,
    /// Name of the connection: the initiator, and its number there.
    pub uid: u64,
    pub nonce: u64,
    /// Counts the `Data` messages of one direction from 0; the number of a flush.
    pub sequence: u64,
}

pub(super) const HEADER_BYTES: usize = 26;
const _: () = assert!(HEADER_BYTES <= HEADER_BYTES_MAX);

impl Header {
    pub(super) fn encode(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let kind = KINDS.iter().position(|&k| k == self.kind).expect("KINDS lists every kind");
        bytes[..2].copy_from_slice(&[MAGIC, kind as u8]);
        bytes[2..10].copy_from_slice(&self.uid.to_le_bytes());
        bytes[10..18].copy_from_slice(&self.nonce.to_le_bytes());
        bytes[18..26].copy_from_slice(&self.sequence.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; HEADER_BYTES] = bytes.try_into().ok()?;
        let kind = *KINDS.get(usize::from(bytes[1])).filter(|_| bytes[0] == MAGIC)?;
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        Some(Self { kind, uid: u64_at(2), nonce: u64_at(10), sequence: u64_at(18) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_round_trip_and_others_are_refused() {
        for kind in KINDS {
            let header = Header { kind, uid: u64::MAX, nonce: 2, sequence: 3 };
            let bytes = header.encode();
            assert_eq!(Header::decode(&bytes), Some(header));
            assert_eq!(Header::decode(&bytes[1..]), None);
        }
        let mut bytes = Header { kind: Kind::Ping, uid: 1, nonce: 2, sequence: 3 }.encode();
        bytes[1] = KINDS.len() as u8;
        assert_eq!(Header::decode(&bytes), None);
        assert_eq!(Header::decode(&[]), None);
    }
}

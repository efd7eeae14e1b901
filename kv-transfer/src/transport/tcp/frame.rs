//! Frames on a socket: a head of 24 bytes, then a body of the length in the head.

use crate::message::MESSAGE_BYTES_MAX;

/// Bytes of a head.
pub(super) const HEAD_BYTES: usize = 24;

/// The kind of the body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Head {
    /// A control message of this length.
    Message {
        len: usize,
    },
    /// Bytes to be stored at an offset, under a ticket.
    Put {
        ticket: u64,
        offset: u64,
        len: usize,
    },
    /// Requests [`Head::Flushed`] once everything before it is stored, and this many writes that went over lanes.
    Flush {
        id: u64,
        posted: u64,
    },
    Flushed {
        id: u64,
    },
    /// Keep-alive of the sender.
    Ping,
    /// What the peer needs to know about the sender's lanes.
    Attach {
        len: usize,
    },
}

/// Its first byte on the wire never begins a TLS record.
const MAGIC: u16 = 0xb07a;

/// Whether a frame begins with this byte.
pub(super) const fn begins_frame(byte: u8) -> bool {
    byte == MAGIC.to_le_bytes()[0]
}

impl Head {
    pub(super) fn encode(self) -> [u8; HEAD_BYTES] {
        let (kind, len, a, b) = match self {
            Self::Message { len } => (1u16, len, 0, 0),
            Self::Put { ticket, offset, len } => (2, len, ticket, offset),
            Self::Flush { id, posted } => (3, 0, id, posted),
            Self::Flushed { id } => (4, 0, id, 0),
            Self::Ping => (5, 0, 0, 0),
            Self::Attach { len } => (6, len, 0, 0),
        };
        let mut head = [0; HEAD_BYTES];
        head[0..2].copy_from_slice(&MAGIC.to_le_bytes());
        head[2..4].copy_from_slice(&kind.to_le_bytes());
        head[4..8].copy_from_slice(&(len as u32).to_le_bytes());
        head[8..16].copy_from_slice(&a.to_le_bytes());
        head[16..24].copy_from_slice(&b.to_le_bytes());
        head
    }

    /// Decodes a head. A head that `encode` does not produce closes the connection.
    pub(super) fn decode(head: &[u8; HEAD_BYTES]) -> Result<Self, &'static str> {
        let u16_at = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]);
        let u64_at = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().expect("8 bytes"));
        let len = u32::from_le_bytes(head[4..8].try_into().expect("4 bytes")) as usize;
        if u16_at(0) != MAGIC {
            return Err("a frame of another protocol");
        }
        match (u16_at(2), u64_at(8), u64_at(16)) {
            (1, 0, 0) if len > 0 && len <= MESSAGE_BYTES_MAX => Ok(Self::Message { len }),
            (2, ticket, offset) if len > 0 => Ok(Self::Put { ticket, offset, len }),
            (3, id, posted) if len == 0 => Ok(Self::Flush { id, posted }),
            (4, id, 0) if len == 0 => Ok(Self::Flushed { id }),
            (5, 0, 0) if len == 0 => Ok(Self::Ping),
            (6, 0, 0) if len > 0 && len <= MESSAGE_BYTES_MAX => Ok(Self::Attach { len }),
            _ => Err("a malformed frame"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_round_trip() {
        let heads = [
            Head::Message { len: 5 },
            Head::Put { ticket: 1, offset: 1 << 40, len: 4096 },
            Head::Flush { id: 7, posted: 8 },
            Head::Flushed { id: 7 },
            Head::Ping,
            Head::Attach { len: 9 },
        ];
        for head in heads {
            assert_eq!(Head::decode(&head.encode()), Ok(head));
        }
    }

    #[test]
    fn malformed_heads_are_refused() {
        let head = |kind: u8, len: u32| {
            let mut head = Head::Ping.encode();
            head[2] = kind;
            head[4..8].copy_from_slice(&len.to_le_bytes());
            head
        };
        for bad in
            [head(0, 0), head(1, u32::MAX), head(1, 0), head(2, 0), head(3, 1), head(6, 0), head(7, 0), [0; HEAD_BYTES]]
        {
            assert!(Head::decode(&bad).is_err(), "{bad:?}");
        }
    }
}

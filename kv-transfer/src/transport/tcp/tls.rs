//! TLS 1.3 on one socket, without buffers inside the TLS library: it reads records from the bytes that were received, and writes to the
//! bytes that are about to be sent.

use crate::credentials::{ALPN, Credentials};
use rustls::client::UnbufferedClientConnection;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, EncodeError, EncryptError, InsufficientSizeError, UnbufferedStatus};
use rustls::{CommonState, Error, ProtocolVersion};

/// Most bytes in one record, as defined by the protocol.
pub(super) const RECORD_BYTES_MAX: usize = 16 << 10;

/// Kind, version and length, before each record.
const HEADER_BYTES: usize = 5;

pub(super) enum Session {
    Client(Box<UnbufferedClientConnection>),
    Server(Box<UnbufferedServerConnection>),
}

/// Encrypted bytes that wait for the socket; more are encrypted once it has taken these. So many that were sent make an [`Outbox`] move the
/// rest to its front: each byte is moved about once.
pub(super) const OUTBOX_BYTES: usize = 256 << 10;

/// Bytes on their way to the socket. Of those that were sent it keeps less than [`OUTBOX_BYTES`], also where it is never empty.
#[derive(Default)]
pub(super) struct Outbox {
    bytes: Vec<u8>,
    sent: usize,
}

impl Outbox {
    pub(super) fn waiting(&self) -> &[u8] {
        &self.bytes[self.sent..]
    }

    pub(super) fn went(&mut self, bytes: usize) {
        self.sent += bytes;
        if self.sent == self.bytes.len() || self.sent >= OUTBOX_BYTES {
            self.bytes.drain(..self.sent);
            self.sent = 0;
        }
    }

    /// Lets `write` append bytes; it is called again with more room if it asks for that.
    fn fill<E>(
        &mut self,
        expected: usize,
        mut write: impl FnMut(&mut [u8]) -> Result<usize, E>,
        more: impl Fn(&E) -> Option<usize>,
    ) -> Result<(), E> {
        let (at, mut room) = (self.bytes.len(), expected);
        loop {
            self.bytes.resize(at + room, 0);
            match write(&mut self.bytes[at..]) {
                Ok(n) => {
                    self.bytes.truncate(at + n);
                    return Ok(());
                }
                Err(error) => {
                    self.bytes.truncate(at);
                    room = more(&error).filter(|&asked| asked > room).ok_or(error)?;
                }
            }
        }
    }
}

/// What to do with a session.
enum Request<'a> {
    /// Decrypt every complete received record for this callback.
    Read(&'a mut dyn FnMut(&[u8]) -> Result<(), String>),
    /// Encrypt these bytes; `None` writes only what the library has pending, such as an alert.
    Write(Option<&'a [u8]>),
}

enum Next {
    Again,
    /// Needs more bytes to continue.
    Idle,
    /// The peer announced that nothing follows.
    Closed,
}

impl Session {
    pub(super) fn client(credentials: &dyn Credentials) -> Result<Self, String> {
        let client = UnbufferedClientConnection::new(credentials.client(), credentials.worker_name());
        client.map(|client| Self::Client(Box::new(client))).map_err(|e| e.to_string())
    }

    pub(super) fn server(credentials: &dyn Credentials) -> Result<Self, String> {
        let server = UnbufferedServerConnection::new(credentials.server());
        server.map(|server| Self::Server(Box::new(server))).map_err(|e| e.to_string())
    }

    fn common(&self) -> &CommonState {
        match self {
            Self::Client(client) => client,
            Self::Server(server) => server,
        }
    }

    pub(super) fn is_handshaking(&self) -> bool {
        self.common().is_handshaking()
    }

    /// Checks the result of the handshake.
    pub(super) fn check(&self, credentials: &dyn Credentials) -> Result<(), String> {
        let common = self.common();
        if common.protocol_version() != Some(ProtocolVersion::TLSv1_3) || common.alpn_protocol() != Some(ALPN) {
            return Err("the peer speaks another protocol in TLS".into());
        }
        let chain = common.peer_certificates().unwrap_or_default();
        match self {
            Self::Client(_) => Ok(()), // The name was verified with the chain.
            Self::Server(_) if !chain.is_empty() && credentials.is_worker(chain) => Ok(()),
            Self::Server(_) => Err("the peer's certificate is not that of a worker".into()),
        }
    }

    /// Decrypts the complete records at the front of `bytes` in place; returns the number of consumed bytes. Handshake answers go to `out`.
    pub(super) fn read(
        &mut self,
        bytes: &mut [u8],
        out: &mut Outbox,
        mut take: impl FnMut(&[u8]) -> Result<(), String>,
    ) -> Result<usize, String> {
        self.run(bytes, out, Request::Read(&mut take))
    }

    /// Encrypts `plain`, at most [`RECORD_BYTES_MAX`], after what waits in `out`. `unread` is the rest that [`Session::read`] left. Writes
    /// nothing before the handshake is complete.
    pub(super) fn write(&mut self, plain: &[u8], unread: &mut [u8], out: &mut Outbox) -> Result<(), String> {
        self.run(unread, out, Request::Write(Some(plain))).map(drop)
    }

    fn run(&mut self, bytes: &mut [u8], out: &mut Outbox, mut wish: Request<'_>) -> Result<usize, String> {
        let mut used = 0;
        loop {
            let (discard, next) = match self {
                Self::Client(client) => {
                    let UnbufferedStatus { discard, state } = client.process_tls_records(&mut bytes[used..]);
                    (discard, act(state, out, &mut wish))
                }
                Self::Server(server) => {
                    let UnbufferedStatus { discard, state } = server.process_tls_records(&mut bytes[used..]);
                    (discard, act(state, out, &mut wish))
                }
            };
            used += discard;
            match next {
                Ok(Next::Again) => {}
                Ok(Next::Idle) => return Ok(used),
                Ok(Next::Closed) => return Err("the peer closed the connection".into()),
                Err(why) => {
                    self.tell_alert(&mut bytes[used..], out);
                    return Err(why);
                }
            }
        }
    }

    /// Writes the library's alert to the peer about an error. The library remembers the position of a partial handshake message in
    /// `unread`, and panics if it is no longer there.
    fn tell_alert(&mut self, unread: &mut [u8], out: &mut Outbox) {
        let mut nothing = Request::Write(None);
        match self {
            Self::Client(client) => act(client.process_tls_records(unread).state, out, &mut nothing).ok(),
            Self::Server(server) => act(server.process_tls_records(unread).state, out, &mut nothing).ok(),
        };
    }
}

fn act<Data>(
    state: Result<ConnectionState<'_, '_, Data>, Error>,
    out: &mut Outbox,
    wish: &mut Request<'_>,
) -> Result<Next, String> {
    match state.map_err(|e| format!("TLS: {e}"))? {
        ConnectionState::ReadTraffic(mut traffic) => {
            while let Some(record) = traffic.next_record() {
                let record = record.map_err(|e| format!("TLS: {e}"))?;
                match wish {
                    Request::Read(take) => take(record.payload)?,
                    Request::Write(_) => return Err("TLS: a record that was read before".into()),
                }
            }
            Ok(Next::Again)
        }
        ConnectionState::EncodeTlsData(mut data) => {
            let more = |error: &EncodeError| match error {
                EncodeError::InsufficientSize(InsufficientSizeError { required_size }) => Some(*required_size),
                EncodeError::AlreadyEncoded => None,
            };
            out.fill(4 << 10, |to| data.encode(to), more).map_err(|e| format!("TLS: {e}"))?;
            Ok(Next::Again)
        }
        ConnectionState::TransmitTlsData(data) => {
            data.done();
            Ok(Next::Again)
        }
        ConnectionState::WriteTraffic(mut traffic) => {
            if let Request::Write(plain) = wish
                && let Some(plain) = plain.take()
            {
                let more = |error: &EncryptError| match error {
                    EncryptError::InsufficientSize(InsufficientSizeError { required_size }) => Some(*required_size),
                    EncryptError::EncryptExhausted => None,
                };
                let expected = plain.len() + 64;
                out.fill(expected, |to| traffic.encrypt(plain, to), more).map_err(|e| format!("TLS: {e}"))?;
                return Ok(Next::Again);
            }
            Ok(Next::Idle)
        }
        ConnectionState::BlockedHandshake => Ok(Next::Idle),
        ConnectionState::PeerClosed | ConnectionState::Closed => Ok(Next::Closed),
        // Early data is never requested, nor are states that a later version may add.
        _ => Err("TLS: a state that is not asked for".into()),
    }
}

/// Number of bytes at the front in complete records, up to the first byte that does not begin one.
pub(super) fn whole_records(bytes: &[u8]) -> usize {
    let mut at = 0;
    loop {
        match first_record(&bytes[at..]) {
            0 => return at,
            len => at += len,
        }
    }
}

/// Length of the record at the front, or 0 if there is no complete one.
pub(super) fn first_record(bytes: &[u8]) -> usize {
    let header = bytes.get(..HEADER_BYTES).filter(|header| begins_record(header[0]));
    let end = header.map(|header| HEADER_BYTES + usize::from(u16::from_be_bytes([header[3], header[4]])));
    end.filter(|end| *end <= bytes.len()).unwrap_or(0)
}

/// Whether a record of TLS begins with this byte: a change of ciphers, an alert, a handshake, or data.
pub(super) const fn begins_record(byte: u8) -> bool {
    matches!(byte, 20..=23)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_counted_up_to_the_first_byte_that_is_none() {
        let record = |len: u8| [&[23, 3, 3, 0, len][..], &vec![7; usize::from(len)]].concat();
        let cases = [
            (vec![], 0),
            (record(3), 8),
            (record(3)[..7].to_vec(), 0),
            ([record(3), record(0)].concat(), 13),
            ([record(3), vec![23, 3, 3]].concat(), 8),
            ([record(3), vec![0x7a, 0xb0, 2, 0, 0]].concat(), 8),
            (vec![0x7a, 0xb0, 2, 0, 0], 0),
        ];
        for (bytes, expected) in cases {
            assert_eq!(whole_records(&bytes), expected, "{bytes:?}");
        }
    }
    #[test]
    fn an_outbox_that_is_never_empty_keeps_little_of_what_was_sent() {
        let (mut outbox, mut written, mut read) = (Outbox::default(), 0u32, 0u32);
        for _ in 0..2000 {
            while outbox.waiting().len() < OUTBOX_BYTES {
                let words: Vec<u8> = (written..written + 1000).flat_map(u32::to_le_bytes).collect();
                let write = |room: &mut [u8]| {
                    room[..words.len()].copy_from_slice(&words);
                    Ok::<_, ()>(words.len())
                };
                outbox.fill(words.len(), write, |()| None).unwrap();
                written += 1000;
            }
            let sent = 50_000;
            for word in outbox.waiting()[..sent].chunks_exact(4) {
                assert_eq!(u32::from_le_bytes(word.try_into().unwrap()), read);
                read += 1;
            }
            outbox.went(sent);
            assert!(!outbox.waiting().is_empty() && outbox.bytes.capacity() < 4 * OUTBOX_BYTES);
        }
    }
}

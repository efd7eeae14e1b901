//! The protocol of two doctors: JSON, one message per line; the connecting side sends first.

use super::trouble::Trouble;
use anyhow::{Context, bail, ensure};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::io::{AsyncBufReadExt, AsyncReadExt as _, AsyncWriteExt as _, BufStream};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Longest line: most of it is UCX addresses in hex.
const LINE_BYTES_MAX: u64 = 256 << 10;
/// Longest wait for the next line; a transfer may run in between.
const LINE_MAX: Duration = Duration::from_secs(120);

/// Requests of the connecting side.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Ask {
    /// The other side's time.
    Clock,
    /// Start a service that receives KV in a pool of this many blocks, over these lanes of UCX, or over TCP.
    Sink { tls: Option<String>, blocks: u32 },
}

/// Answers of the other side.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Answer {
    /// Clock of the other side, in microseconds since 1970.
    Clock { at_us: u64 },
    /// Address of the service, in hex; it runs until the connection ends.
    Sink { address: String },
    /// The reason why the request failed.
    Refused { why: String },
}

/// Microseconds since 1970, by this host's clock.
pub(super) fn now_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64)
}

/// A connection between two doctors.
pub(super) struct Line(BufStream<TcpStream>);

impl Line {
    pub(super) fn new(stream: TcpStream) -> std::io::Result<Self> {
        stream.set_nodelay(true)?;
        Ok(Self(BufStream::new(stream)))
    }

    pub(super) fn socket(&self) -> &TcpStream {
        self.0.get_ref()
    }

    pub(super) async fn say(&mut self, what: &impl Serialize) -> anyhow::Result<()> {
        let line = serde_json::to_string(what)? + "\n";
        let write = async {
            self.0.write_all(line.as_bytes()).await?;
            self.0.flush().await
        };
        timeout(LINE_MAX, write).await.context("the other side does not read")??;
        Ok(())
    }

    /// The next line; `None` if the other side has closed the connection.
    pub(super) async fn hear<T: DeserializeOwned>(&mut self) -> anyhow::Result<Option<T>> {
        let mut line = Vec::new();
        let mut bounded = (&mut self.0).take(LINE_BYTES_MAX);
        let read = timeout(LINE_MAX, bounded.read_until(b'\n', &mut line)).await;
        if read.context("the other side does not answer")?? == 0 {
            return Ok(None);
        }
        ensure!(line.ends_with(b"\n"), "the other side is not `baton doctor`: it sent a line without an end");
        Ok(Some(serde_json::from_slice(&line).context("the other side is not a `baton doctor` of this version")?))
    }

    /// Sends a request and waits for the answer.
    pub(super) async fn ask(&mut self, what: &Ask) -> anyhow::Result<Answer> {
        self.say(what).await?;
        match self.hear().await?.context("the other side closed the connection")? {
            Answer::Refused { why } => bail!(Trouble::Refused(why)),
            answer => Ok(answer),
        }
    }
}

//! A TCP relay that can be silenced without closing anything.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};

/// Listens on a free port and relays bytes to one address and back. Ends when dropped.
pub struct Relay {
    address: String,
    silent: watch::Sender<bool>,
    frozen: watch::Sender<usize>,
    accepted: Arc<AtomicUsize>,
    _stop: DropGuard,
}

impl Relay {
    /// Starts to relay to `target`, `host:port`.
    pub async fn start(target: String) -> io::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let address = listener.local_addr()?.to_string();
        let (silent, frozen, stop) = (watch::Sender::new(false), watch::Sender::new(0), CancellationToken::new());
        let accepted = Arc::new(AtomicUsize::new(0));
        tokio::spawn({
            let (silent, frozen) = (silent.subscribe(), frozen.subscribe());
            let (stop, accepted) = (stop.clone(), accepted.clone());
            async move {
                let accept = async {
                    while let Ok((near, _)) = listener.accept().await {
                        let number = accepted.fetch_add(1, Ordering::Relaxed);
                        let Ok(far) = TcpStream::connect(&target).await else { continue };
                        let ((near_read, near_write), (far_read, far_write)) = (near.into_split(), far.into_split());
                        let there = carry(near_read, far_write, silent.clone());
                        let back = carry(far_read, near_write, silent.clone());
                        let (stop, mut frozen) = (stop.clone(), frozen.clone());
                        tokio::spawn(async move {
                            // While frozen, both are kept: dropping them would close their sockets.
                            let (mut there, mut back) = (pin!(there), pin!(back));
                            tokio::select! {
                                // Either end closing closes both.
                                _ = &mut there => return,
                                _ = &mut back => return,
                                () = stop.cancelled() => return,
                                _ = frozen.wait_for(|first| number < *first) => {}
                            }
                            stop.cancelled().await;
                        });
                    }
                };
                tokio::select! {
                    () = accept => {}
                    () = stop.cancelled() => {}
                }
            }
        });
        Ok(Self { address, silent, frozen, accepted, _stop: stop.drop_guard() })
    }

    /// Address of the relay, `host:port`.
    pub fn address(&self) -> &str {
        &self.address
    }

    pub fn accepted(&self) -> usize {
        self.accepted.load(Ordering::Relaxed)
    }

    /// Stops all bytes on existing connections, without notifying either side; new connections work.
    pub fn freeze(&self) {
        self.frozen.send_replace(self.accepted());
    }

    /// Holds all bytes back, or releases them.
    pub fn set_silent(&self, silent: bool) {
        self.silent.send_replace(silent);
    }
}

/// Relays bytes one way to the end of `from`, but none while `silent`.
pub(crate) async fn carry(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    mut silent: watch::Receiver<bool>,
) -> io::Result<()> {
    let mut buffer = [0; 4096];
    loop {
        let n = from.read(&mut buffer).await?;
        if n == 0 || silent.wait_for(|silent| !silent).await.is_err() {
            return Ok(());
        }
        to.write_all(&buffer[..n]).await?;
    }
}

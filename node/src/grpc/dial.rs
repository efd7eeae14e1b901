//! Connections to the addresses of peers.
//!
//! The system's look-up of a host name takes a thread for as long as name servers do not answer, even after the caller
//! stopped waiting. Peers choose the names in their records, and other work needs the runtime's threads too, so few
//! names are looked up at a time.

use http::uri::Authority;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;

/// Most look-ups of host names at a time in this process.
const LOOK_UPS_MAX: usize = 32;
static LOOK_UPS: Semaphore = Semaphore::const_new(LOOK_UPS_MAX);

/// Connects to a host and port. The caller bounds the wait.
pub(super) async fn connect(to: &Authority) -> io::Result<TcpStream> {
    let port = to.port_u16().ok_or(io::ErrorKind::InvalidInput)?;
    let host = to.host().trim_start_matches('[').trim_end_matches(']');
    if let Ok(address) = host.parse::<IpAddr>() {
        return TcpStream::connect((address, port)).await;
    }
    let host = host.to_owned();
    let addresses = look_up(move || Ok((host.as_str(), port).to_socket_addrs()?.collect())).await?;
    TcpStream::connect(&addresses[..]).await
}

/// The result of `resolve`, which blocks.
async fn look_up(
    resolve: impl FnOnce() -> io::Result<Vec<SocketAddr>> + Send + 'static,
) -> io::Result<Vec<SocketAddr>> {
    let permit = LOOK_UPS.acquire().await.map_err(io::Error::other)?;
    // The permit belongs to the thread: a caller that stops waiting does not end the look-up.
    let looked_up = spawn_blocking(move || {
        let result = resolve();
        drop(permit);
        result
    });
    looked_up.await.map_err(io::Error::other)?
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, mpsc};
    use std::time::Duration;
    use tokio::net::TcpListener;
    use tokio::runtime::Builder;
    use tokio::time::timeout;

    #[tokio::test]
    async fn a_name_and_an_address_are_reached() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        for host in ["127.0.0.1", "localhost"] {
            let to = format!("{host}:{port}").parse().unwrap();
            assert_eq!(connect(&to).await.unwrap().peer_addr().unwrap().port(), port, "{host}");
        }
        if let Ok(listener) = TcpListener::bind("[::1]:0").await {
            let to = format!("[::1]:{}", listener.local_addr().unwrap().port()).parse().unwrap();
            connect(&to).await.unwrap();
        }
    }

    #[test]
    fn names_that_nobody_answers_for_leave_threads_for_other_work() {
        let threads = LOOK_UPS_MAX + 8;
        let runtime =
            Builder::new_multi_thread().worker_threads(2).max_blocking_threads(threads).enable_all().build().unwrap();
        let begun = Arc::new(AtomicUsize::new(0));
        let (answer, answers) = mpsc::channel::<()>();
        let answers = Arc::new(parking_lot::Mutex::new(answers));
        runtime.block_on(async {
            // Callers stop waiting, and others begin.
            for _ in 0..3 {
                for _ in 0..threads {
                    let (begun, answers) = (begun.clone(), answers.clone());
                    let resolve = move || {
                        begun.fetch_add(1, Ordering::Relaxed);
                        // Ends when the sender is dropped.
                        let _dropped = answers.lock().recv();
                        Ok(Vec::new())
                    };
                    tokio::spawn(timeout(Duration::from_millis(20), look_up(resolve)));
                }
                tokio::time::sleep(Duration::from_millis(40)).await;
            }
            let other = timeout(Duration::from_secs(5), spawn_blocking(|| ())).await;
            assert!(other.is_ok(), "all threads wait for name servers");
            let begun = begun.load(Ordering::Relaxed);
            assert!((1..=LOOK_UPS_MAX).contains(&begun), "{begun} look-ups at a time");
        });
        drop(answer);
    }
}

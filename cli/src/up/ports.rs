//! Checks ports, so that a port in use is reported before anything starts.

use anyhow::{Context, bail};
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};

/// Fails if `address` cannot be bound, and names the flag that changes it.
pub(super) fn check(address: SocketAddr, flag: &str) -> anyhow::Result<()> {
    match TcpListener::bind(address) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            bail!(
                "port {} of {} is taken: stop what listens there, or choose another with {flag}",
                address.port(),
                address.ip()
            )
        }
        Err(error) => Err(error).with_context(|| format!("cannot listen on {address} ({flag})")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_taken_port_names_the_flag() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let error = check(taken.local_addr().unwrap(), "--http-port").unwrap_err().to_string();
        assert!(error.contains("is taken") && error.contains("--http-port"), "{error}");
    }
}

//! Budget for bytes of requests that are not parsed yet: one budget for all partial requests, on every front, and a
//! share of it for each client.
//!
//! The reader of a body charges its bytes to the budget before it stores them, so the budget bounds memory, whatever
//! clients send. The last part of both limits is reserved for small bodies: ordinary requests pass while a client's
//! long ones stall. With keys, all callers without one share a part. Answers that are gathered before they are sent
//! have a budget of the same kind.

use baton_types::places::host_of;
use baton_types::{ErrorKind, RequestError};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

/// A body of at most this many bytes is small.
const SMALL_BYTES: u64 = 64 << 10;
/// The last fraction (one in eight) is for small bodies only.
const FOR_SMALL: u64 = 8;
/// Bodies are received within seconds.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The client that bytes are charged to.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Client {
    /// A caller with a key.
    Tenant(String),
    /// A caller without a key: its address; for IPv6 the network of a host.
    Address(IpAddr),
}

impl Client {
    /// A client without a key.
    pub fn at(address: IpAddr) -> Self {
        Self::Address(host_of(address))
    }
}

/// The budget. Clones share it.
#[derive(Clone, Debug)]
pub struct Intake(Arc<Budget>);

#[derive(Debug)]
struct Budget {
    bytes_max: u64,
    share_bytes_max: u64,
    /// The share of one address.
    address_bytes_max: u64,
    strangers_bytes_max: u64,
    used: Mutex<Used>,
}

#[derive(Debug, Default)]
struct Used {
    all: u64,
    strangers: u64,
    clients: HashMap<Client, u64>,
}

/// Bytes charged for one message; dropping it returns them.
#[derive(Debug)]
pub struct Hold {
    budget: Arc<Budget>,
    client: Client,
    bytes: u64,
}

/// The budget has no room for more bytes now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IntakeFull {
    /// The client has used its share.
    #[error(
        "requests of this client that are still being read hold {0} bytes, its share; send fewer at once, or try again later"
    )]
    Share(u64),
    /// All clients without a key together have used their share.
    #[error("calls without a known key hold {0} bytes, their share of all; send an API key, or try again later")]
    Strangers(u64),
    /// All clients together have used the budget.
    #[error("requests that are still being read hold {0} bytes, which is the limit; try again later")]
    All(u64),
}

impl From<IntakeFull> for RequestError {
    fn from(full: IntakeFull) -> Self {
        Self::new(ErrorKind::Overloaded, full.to_string()).retry_after(RETRY_AFTER)
    }
}

impl Intake {
    /// At most `bytes_max` together, and `share_bytes_max` per client.
    pub fn new(bytes_max: u64, share_bytes_max: u64) -> Self {
        Self::with(bytes_max, share_bytes_max, share_bytes_max, bytes_max)
    }

    /// The same, with at most `strangers_bytes_max` for all clients without a key together, and half of that per
    /// address.
    pub fn with_strangers(bytes_max: u64, share_bytes_max: u64, strangers_bytes_max: u64) -> Self {
        let address_bytes_max = share_bytes_max.min(strangers_bytes_max / 2);
        Self::with(bytes_max, share_bytes_max, address_bytes_max, strangers_bytes_max)
    }

    fn with(bytes_max: u64, share_bytes_max: u64, address_bytes_max: u64, strangers_bytes_max: u64) -> Self {
        let used = Mutex::default();
        Self(Arc::new(Budget { bytes_max, share_bytes_max, address_bytes_max, strangers_bytes_max, used }))
    }

    /// An empty hold, for a message of `client`.
    pub fn hold(&self, client: Client) -> Hold {
        Hold { budget: self.0.clone(), client, bytes: 0 }
    }

    /// Bytes that all clients are charged now.
    pub fn used(&self) -> u64 {
        self.0.used.lock().all
    }
}

impl Client {
    fn is_stranger(&self) -> bool {
        matches!(self, Self::Address(_))
    }
}

impl Budget {
    /// The share of one client.
    fn share_of(&self, client: &Client) -> u64 {
        if client.is_stranger() { self.address_bytes_max } else { self.share_bytes_max }
    }
}

/// The part of a limit that a message of so many bytes may use.
fn bound(bytes: u64, max: u64) -> u64 {
    if bytes <= SMALL_BYTES { max } else { max - max / FOR_SMALL }
}

impl Hold {
    /// Bytes that this hold is charged.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The most bytes that one long message of this client can ever hold.
    pub fn most(&self) -> u64 {
        bound(u64::MAX, self.budget.share_of(&self.client).min(self.budget.bytes_max))
    }

    /// Charges `more` bytes, or none.
    pub fn grow(&mut self, more: u64) -> Result<(), IntakeFull> {
        self.set(self.bytes.saturating_add(more))
    }

    /// Holds `bytes` from now on; a smaller amount always fits. Without room the hold is unchanged.
    pub fn set(&mut self, bytes: u64) -> Result<(), IntakeFull> {
        let (share, is_stranger) = (self.budget.share_of(&self.client), self.client.is_stranger());
        let Budget { bytes_max, strangers_bytes_max, used, .. } = &*self.budget;
        let mut used = used.lock();
        let all = used.all - self.bytes + bytes;
        let client = used.clients.get(&self.client).copied().unwrap_or(0) - self.bytes + bytes;
        let strangers = if is_stranger { used.strangers - self.bytes + bytes } else { used.strangers };
        if bytes > self.bytes {
            if client > bound(bytes, share) {
                return Err(IntakeFull::Share(share));
            }
            if all > bound(bytes, *bytes_max) {
                return Err(IntakeFull::All(*bytes_max));
            }
            if is_stranger && strangers > bound(bytes, *strangers_bytes_max) {
                return Err(IntakeFull::Strangers(*strangers_bytes_max));
            }
        }
        (used.all, used.strangers) = (all, strangers);
        if client == 0 {
            used.clients.remove(&self.client);
        } else {
            used.clients.insert(self.client.clone(), client);
        }
        drop(used);
        self.bytes = bytes;
        Ok(())
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // A smaller amount always fits.
        let _ = self.set(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn tenant(name: &str) -> Client {
        Client::Tenant(name.into())
    }

    #[test]
    fn one_client_has_its_share_and_all_have_the_whole() {
        let intake = Intake::new(24 * MIB, 16 * MIB);
        let (mut a, mut b, mut c) = (intake.hold(tenant("a")), intake.hold(tenant("a")), intake.hold(tenant("b")));
        a.grow(10 * MIB).unwrap();
        b.grow(4 * MIB).unwrap();
        assert_eq!(b.grow(MIB), Err(IntakeFull::Share(16 * MIB)));
        c.grow(7 * MIB).unwrap();
        assert_eq!(c.grow(MIB), Err(IntakeFull::All(24 * MIB)));
        assert_eq!((a.bytes(), b.bytes(), c.bytes(), intake.used()), (10 * MIB, 4 * MIB, 7 * MIB, 21 * MIB));
        drop(a);
        c.grow(8 * MIB).unwrap_err();
        c.grow(7 * MIB).unwrap();
        b.set(MIB).unwrap();
        drop((b, c));
        assert!(intake.used() == 0 && intake.0.used.lock().clients.is_empty(), "nobody is remembered");
    }

    #[test]
    fn small_ones_pass_where_long_ones_do_not() {
        let intake = Intake::new(16 * MIB, 8 * MIB);
        let mut long = intake.hold(tenant("a"));
        long.grow(7 * MIB).unwrap();
        assert!(long.grow(1).is_err());
        let mut small = intake.hold(tenant("a"));
        small.grow(SMALL_BYTES).unwrap();
        assert!(small.grow(1).is_err());
    }

    #[test]
    fn without_keys_addresses_have_all_of_it() {
        let intake = Intake::new(4 * MIB, 2 * MIB);
        let mut hosts: Vec<Hold> = (0..4).map(|host| intake.hold(Client::at([10, 0, 0, host].into()))).collect();
        hosts[..3].iter_mut().for_each(|host| host.grow(MIB).unwrap());
        assert_eq!(hosts[3].grow(MIB), Err(IntakeFull::All(4 * MIB)), "nobody is told to send a key");
    }

    #[test]
    fn who_has_no_key_leaves_room_for_those_who_have() {
        let intake = Intake::with_strangers(16 * MIB, 8 * MIB, 4 * MIB);
        let mut strangers: Vec<Hold> = (0..4).map(|host| intake.hold(Client::at([10, 0, 0, host].into()))).collect();
        strangers[0].grow(MIB).unwrap();
        assert_eq!(strangers[0].grow(MIB), Err(IntakeFull::Share(2 * MIB)), "no address has it all");
        strangers[1].grow(MIB).unwrap();
        strangers[2].grow(MIB).unwrap();
        assert_eq!(strangers[3].grow(MIB), Err(IntakeFull::Strangers(4 * MIB)));
        intake.hold(tenant("a")).grow(7 * MIB).unwrap();
        strangers.truncate(1);
        intake.hold(Client::at([10, 0, 0, 9].into())).grow(MIB).unwrap();
        drop(strangers);
        assert!(intake.used() == 0 && intake.0.used.lock().strangers == 0);
    }

    #[test]
    fn a_host_is_one_client() {
        let at = |address: &str| Client::at(address.parse().unwrap());
        assert_eq!(at("2001:db8::1"), at("2001:db8::ffff:1"));
    }
}

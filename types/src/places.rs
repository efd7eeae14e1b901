//! Which holder of a limited number of places loses one, when a new holder needs it. Pure.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};

/// The address that identifies a host. For IPv6 it is the /64: a host may use any address within its own.
pub fn host_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64).into(),
        v4 => v4,
    }
}

/// The place to free: the oldest place of the holder with the most places. If several holders have that many, it is the oldest of their
/// places. `places` are in the order in which they were taken. So a holder of many places cannot displace holders of few. Also returns how many
/// places that holder has.
pub fn place_to_free<P: Copy + Ord, H: Ord>(places: impl IntoIterator<Item = (P, H)>) -> Option<(P, usize)> {
    let mut by_holder: BTreeMap<H, (usize, P)> = BTreeMap::new();
    for (place, holder) in places {
        by_holder.entry(holder).or_insert((0, place)).0 += 1;
    }
    let most = by_holder.into_values().max_by_key(|(count, oldest)| (*count, Reverse(*oldest)));
    most.map(|(count, oldest)| (oldest, count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_of_who_holds_most_is_freed() {
        let of = |places: &[(u64, &str)]| place_to_free(places.iter().copied());
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[(1, "b"), (2, "a"), (3, "a")]), Some((2, 2)), "who came first keeps its place");
        assert_eq!(of(&[(3, "b"), (4, "a")]), Some((3, 1)), "of those that hold as many, the oldest");
    }

    #[test]
    fn a_host_has_one_address() {
        let host = |address: &str| host_of(address.parse().expect("an address"));
        assert_eq!(host("2001:db8::1"), host("2001:db8::ffff:1"));
        assert_ne!(host("2001:db8::1"), host("2001:db8:0:1::1"));
        assert_ne!(host("10.0.0.1"), host("10.0.0.2"));
        assert_eq!(host("10.0.0.1"), host("::ffff:10.0.0.1"));
    }
}

//! Who gives way where all places are taken.

use crate::intake::Client;
use std::cmp::Reverse;
use std::collections::HashMap;

/// The oldest place of whoever holds most, of places in the order in which they were taken.
pub(crate) fn gives_way<'a>(places: impl Iterator<Item = (u64, Option<&'a Client>)>) -> Option<u64> {
    let mut by_client: HashMap<Option<&Client>, (usize, u64)> = HashMap::new();
    for (number, client) in places {
        by_client.entry(client).or_insert((0, number)).0 += 1;
    }
    let most = by_client.into_values().max_by_key(|(count, oldest)| (*count, Reverse(*oldest)));
    most.map(|(_, oldest)| oldest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_holds_most_loses_the_oldest() {
        let at = |host: u8| Client::at([10, 0, 0, host].into());
        let (a, b) = (at(1), at(2));
        let of = |places: &[(u64, &Client)]| gives_way(places.iter().map(|(number, client)| (*number, Some(*client))));
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[(1, &b), (2, &a), (3, &a)]), Some(2), "a peer that came first keeps its place");
        assert_eq!(of(&[(3, &a), (4, &b)]), Some(3), "of those that hold as many, the oldest");
    }
}

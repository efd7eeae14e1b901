//! Gets, as their reader drives them.

use super::*;
use crate::GetRequest;

#[test]
fn a_get_reads_within_its_credit() {
    let mut limited = config("here");
    limited.limits.in_flight_bytes_max = 1; // At least one read is always in flight.
    let region = Region::anonymous(limited.map.bytes()).unwrap();
    let (mut driver, notes, _) = Driver::noting_with(limited, region);
    let (now, apart) = (Instant::now(), || GroupBlocks(vec![vec![BlockId(0), BlockId(2)]]));
    let peer = Peer { party: party("peer"), address: TransferAddress::Tcp(([127, 0, 0, 1], 1).into()), shard: 0 };
    let request = GetRequest {
        request_id: RequestId::try_new("r").unwrap(),
        name: Vec::new(),
        from: 0,
        tokens: 32,
        blocks: apart(),
        deadline: now + Duration::from_secs(60),
        hold: Box::new(()),
    };
    let key = driver.inbox.get(peer, request, tokio::sync::oneshot::channel().0).unwrap();
    driver.commands(now);
    driver.hear(&Message::Welcome(greeting()), now);
    driver.hear(&Message::Grant { handoff: key.0, ticket: TicketId(7), blocks: apart(), from: 0 }, now);
    driver.post(now);
    assert_eq!(*notes.lock(), ["get"], "of the first block; the other one waits");
}

//! Offers against a room counted in tokens, under simulated time.

use super::*;
use baton_engine::fair::FairOrder;
use baton_types::{Incarnation, InstanceId, Party, TenantLabel, Weight};

/// A pool with this many free tokens in blocks of 16; of each prompt this many tokens are cached.
struct Tokens {
    free: usize,
    cached: usize,
    order: FairOrder,
    /// What the tenants' sequences hold, of places and blocks.
    accounts: Accounts,
}

impl Room for Tokens {
    type Lease = usize;

    fn reserve(&mut self, tokens: usize, _: &[PrefixHash]) -> Option<usize> {
        self.free = self.free.checked_sub(tokens)?;
        Some(tokens)
    }

    fn cached_tokens(&self, _: &[PrefixHash]) -> usize {
        self.cached
    }

    fn block_tokens(&self) -> usize {
        16
    }

    fn accounts(&self) -> Accounts {
        self.accounts.clone()
    }

    fn granted(&mut self, turn: SequenceKey, share: Share, _: &usize) {
        self.order.served(turn.priority(), turn.start());
        self.order.give_back(turn.priority(), share, self.cached);
    }

    fn gave_up(&mut self, turn: SequenceKey, share: Share, tokens: usize) {
        self.order.give_back(turn.priority(), share, tokens);
    }
}

/// A source that may or may not still wait for an answer.
#[derive(Debug)]
struct Asks(bool);

impl Reply for Asks {
    fn is_wanted(&self) -> bool {
        self.0
    }
}

/// A stream with a priority, the hashes of its prompt, and its tenant.
#[derive(Debug)]
struct Stream(i32, Vec<u8>, Share);

impl Wanted for Stream {
    fn priority(&self) -> i32 {
        self.0
    }

    fn share(&self) -> Share {
        self.2
    }

    fn block_hashes(&self) -> Arc<[PrefixHash]> {
        self.1.iter().map(|n| PrefixHash([*n; 16])).collect()
    }
}

fn id(name: &str) -> RequestId {
    RequestId::try_new(name).unwrap()
}

fn source() -> Party {
    Party { instance: InstanceId::try_new("p").unwrap(), incarnation: Incarnation(1) }
}

struct World {
    grants: Grants<Stream, Asks>,
    room: Tokens,
    now: Instant,
    turns: u64,
    /// The tenant and weight of the next offers.
    share: Share,
}

impl World {
    fn new(free: usize) -> Self {
        let grants = Grants::new(ClaimLimits { claims_max: 16, tokens_max: 10_000 });
        // Plenty of both: all are within their shares, unless a test says otherwise.
        let accounts = Accounts::new(1_000, 1_000);
        let room = Tokens { free, cached: 0, order: FairOrder::default(), accounts };
        Self { grants, room, now: Instant::now(), turns: 0, share: Share::default() }
    }

    /// A claim and its offer, of this many tokens, for a prompt with these hashes.
    fn offer(&mut self, name: &str, priority: i32, tokens: u32, hashes: &[u8]) {
        let stream = Stream(priority, hashes.to_vec(), self.share);
        let claim = Claim { source: source(), tokens, share: self.share, offered: false, stream };
        self.grants.book(id(name), claim).unwrap();
        self.asks(name, tokens, true).unwrap();
    }

    fn asks(&mut self, name: &str, tokens: u32, is_wanted: bool) -> Result<(), RefuseReason> {
        let deadline = self.now + Duration::from_secs(9);
        let offer =
            ReserveOffer { request_id: id(name), source: source(), tokens, partial: true, deadline, shard: 0, legs: 1 };
        self.turns += 1;
        let (arrival, order) = (self.turns, &mut self.room.order);
        let turn = |priority, share, tokens| {
            SequenceKey::new(priority, order.enter(priority, share, tokens, None).start, arrival)
        };
        self.grants.offered(offer, Asks(is_wanted), self.now, turn).map_err(|refused| refused.reason)
    }

    /// Which offers are granted now, for which offer room is kept, and how soon to decide again.
    fn decides(&mut self) -> (Vec<String>, Option<usize>, Option<Duration>) {
        let Decisions { granted, keep_room, wake_at } = self.grants.decide(self.now, &mut self.room);
        let granted = granted.into_iter().map(|granted| granted.offer.request_id.to_string()).collect();
        (granted, keep_room.map(|kept| kept.tokens), wake_at.map(|at| at.saturating_duration_since(self.now)))
    }
}

#[test]
fn offers_are_granted_by_priority_and_then_as_they_came() {
    let mut world = World::new(0);
    for (name, priority) in [("a", 0), ("b", 1), ("c", 0), ("d", 1)] {
        world.offer(name, priority, 16, &[]);
    }
    assert_eq!(world.decides(), (vec![], Some(16), Some(Duration::ZERO)), "the first of all has its room kept");
    world.room.free = 48;
    assert_eq!(world.decides().0, ["b", "d", "a"]);
    world.room.free = 16;
    assert_eq!(world.decides(), (vec!["c".to_owned()], None, None));
}

/// The tenant of this number.
fn tenant(number: u64, weight: u32) -> Share {
    Share { tenant: TenantLabel(number), weight: Weight::try_new(weight).unwrap() }
}

#[test]
fn tenants_of_one_priority_take_turns_by_weight() {
    let mut world = World::new(0);
    for (names, share) in [(["a0", "a1", "a2", "a3"], tenant(1, 1)), (["b0", "b1", "b2", "b3"], tenant(2, 2))] {
        world.share = share;
        names.iter().for_each(|name| world.offer(name, 0, 16, &[]));
    }
    world.share = tenant(3, 1);
    world.offer("urgent", 1, 16, &[]);
    world.room.free = 160;
    assert_eq!(world.decides().0, ["urgent", "a0", "b0", "b1", "a1", "b2", "b3", "a2", "a3"]);
}

#[test]
fn one_below_its_share_waits_for_no_flood() {
    let mut world = World::new(64);
    world.share = tenant(1, 1);
    let flood: Vec<String> = (0..10).map(|n| format!("flood{n}")).collect();
    flood.iter().for_each(|name| world.offer(name, 0, 32, &[]));
    assert_eq!(world.decides().0, flood[..2]);
    world.share = tenant(2, 1);
    world.offer("small", 0, 48, &[]);
    let Decisions { keep_room, .. } = world.grants.decide(world.now, &mut world.room);
    let kept = keep_room.map(|kept| (kept.share, kept.tokens));
    assert_eq!(kept, Some((tenant(2, 1), 48)), "the next room is its own, whatever else waits");
    world.room.free = 48;
    assert_eq!(world.decides(), (vec!["small".to_owned()], Some(32), Some(Duration::ZERO)));
    // It does not come first forever: what it gets now counts against its share.
    world.offer("next", 0, 320, &[]);
    world.offer("over", 0, 16, &[]);
    world.room.free = 10_000;
    assert_eq!(world.decides().0[..3], ["flood2", "next", "flood3"]);
}

#[test]
fn an_offer_beyond_its_share_comes_after_those_within_theirs() {
    let (a, b) = (tenant(1, 1), tenant(2, 1));
    // Eight blocks, four for each. `a` has a sequence of three, and the next two offers go beyond that.
    let world = || {
        let mut world = World::new(32);
        world.room.accounts = Accounts::new(8, 8);
        world.room.accounts.add(a, 3);
        world.share = a;
        world.offer("a0", 0, 48, &[]);
        world.offer("a1", 0, 16, &[]);
        world
    };
    let mut alone = world();
    assert_eq!(alone.decides(), (vec![], Some(48), Some(Duration::ZERO)), "alone, it is granted in order");
    alone.room.free = 64;
    assert_eq!(alone.decides().0, ["a0", "a1"]);

    let mut shared = world();
    shared.share = b;
    shared.offer("b0", 0, 16, &[]);
    assert_eq!(shared.decides(), (vec!["b0".to_owned()], Some(48), Some(Duration::ZERO)));
    // A large offer within its share lets no other overtake it, and the room is kept for it.
    shared.offer("b1", 0, 48, &[]);
    assert_eq!(shared.decides(), (vec![], Some(48), Some(Duration::ZERO)));
    let kept = shared.grants.decide(shared.now, &mut shared.room).keep_room;
    assert_eq!(kept.map(|kept| kept.share), Some(b));
    shared.room.free = 200;
    assert_eq!(shared.decides().0, ["b1", "a0", "a1"]);
}

#[test]
fn kv_that_arrives_counts_against_the_share_of_its_tenant() {
    let (a, b) = (tenant(1, 1), tenant(2, 1));
    // Eight blocks, four for each.
    let mut world = World::new(208);
    world.room.accounts = Accounts::new(8, 8);
    // What `b` was granted before has arrived and ended, so its next offer starts after that of `a`.
    world.share = b;
    world.offer("b0", 0, 160, &[]);
    world.share = a;
    world.offer("a0", 0, 48, &[]);
    assert_eq!(world.decides().0, ["b0", "a0"]);
    world.grants.arrived(&id("b0"));
    world.offer("a1", 0, 32, &[]);
    world.share = b;
    world.offer("b1", 0, 16, &[]);
    world.room.free = 16;
    // `a` has three blocks on their way, and two more are beyond its share.
    assert_eq!(world.decides(), (vec!["b1".to_owned()], Some(32), Some(Duration::ZERO)));
    world.grants.arrived(&id("a0"));
    world.share = b;
    world.offer("b2", 0, 16, &[]);
    assert_eq!(world.decides(), (vec![], Some(32), Some(Duration::ZERO)), "now they are not");
    let kept = world.grants.decide(world.now, &mut world.room).keep_room;
    assert_eq!(kept.map(|kept| kept.share), Some(a));
}

#[test]
fn what_is_cached_or_never_granted_is_given_back() {
    let starts_as_before = |world: &mut World| {
        let next = world.room.order.enter(0, world.share, 16, None).start;
        next == FairOrder::default().enter(0, world.share, 16, None).start
    };
    let mut world = World::new(0);
    world.offer("gone", 0, 160, &[]);
    world.grants.end(&id("gone"), &mut world.room);
    assert!(starts_as_before(&mut world), "its stream ended");

    let mut world = World::new(1_000);
    world.room.cached = 160;
    world.offer("cached", 0, 160, &[]);
    assert_eq!(world.decides().0, ["cached"]);
    assert!(world.grants.granted_turn(&id("cached")).is_some(), "it goes on with the KV");
    assert!(starts_as_before(&mut world), "all of it was cached");
}

#[test]
fn a_large_offer_is_not_overtaken_by_small_ones() {
    let mut world = World::new(64);
    world.offer("large", 0, 160, &[]);
    world.offer("small", 0, 16, &[]);
    for free in [64, 100, 159] {
        world.room.free = free;
        assert_eq!(world.decides(), (vec![], Some(160), Some(Duration::ZERO)), "{free} are free");
    }
    world.room.free = 176;
    assert_eq!(world.decides(), (vec!["large".to_owned(), "small".to_owned()], None, None));
}

#[test]
fn an_offer_waits_for_kv_that_is_on_its_way_for_a_while() {
    let mut world = World::new(1_000);
    world.offer("first", 0, 64, &[1, 2, 3, 4]);
    assert_eq!(world.decides().0, ["first"]);
    world.offer("same", 0, 64, &[1, 2, 3, 4]);
    world.offer("other", 0, 64, &[1, 9, 9, 9]);
    world.offer("unlike", 0, 64, &[7, 8, 9, 10]);
    // Its first block is on its way for both, and no other offer waits for them.
    assert_eq!(world.decides(), (vec!["unlike".to_owned()], None, Some(ARRIVES_MAX)));
    // One block has arrived: the next block of one of them is still on its way.
    world.room.cached = 16;
    assert_eq!(world.decides(), (vec!["other".to_owned()], None, Some(ARRIVES_MAX)));
    world.now += ARRIVES_MAX - Duration::from_millis(1);
    assert_eq!(world.decides().0, [""; 0]);
    world.now += Duration::from_millis(1);
    assert_eq!(world.decides(), (vec!["same".to_owned()], None, None), "then it comes twice");

    let mut world = World::new(1_000);
    world.offer("first", 0, 64, &[1, 2, 3, 4]);
    world.decides();
    world.offer("same", 0, 64, &[1, 2, 3, 4]);
    assert_eq!(world.decides().0, [""; 0]);
    world.grants.arrived(&id("first"));
    assert_eq!(world.decides().0, ["same"], "what does not come is not awaited");
}

#[test]
fn the_end_of_a_claim_takes_its_offer_along() {
    let mut world = World::new(0);
    world.offer("gone", 0, 160, &[]);
    world.offer("stays", 0, 16, &[]);
    assert!(world.grants.is_waiting(&id("gone")));
    assert_eq!((world.grants.claimed(), world.grants.claimed_tokens()), (2, 176));
    world.grants.end(&id("gone"), &mut world.room);
    assert!(!world.grants.is_waiting(&id("gone")));
    assert_eq!((world.grants.claimed(), world.grants.claimed_tokens()), (1, 16));
    world.room.free = 16;
    assert_eq!(world.decides(), (vec!["stays".to_owned()], None, None));
    assert!(!world.grants.is_waiting(&id("stays")) && !world.grants.is_empty(), "its KV is on its way");
    assert_eq!((world.grants.claimed(), world.grants.claimed_tokens()), (1, 0), "its blocks are counted as such");
    world.grants.end(&id("stays"), &mut world.room);
    assert!(world.grants.is_empty());
}

#[test]
fn nobody_waits_for_an_offer_that_is_given_up() {
    let mut world = World::new(16);
    let stream = Stream(0, Vec::new(), Share::default());
    let claim = Claim { source: source(), tokens: 160, share: Share::default(), offered: false, stream };
    world.grants.book(id("given-up"), claim).unwrap_or_else(|error| panic!("{error}"));
    world.asks("given-up", 160, false).unwrap();
    world.offer("next", 0, 16, &[]);
    assert_eq!(world.decides().0, ["next"]);
}

#[test]
fn what_nobody_claimed_is_refused() {
    let mut world = World::new(100);
    assert_eq!(world.asks("a", 16, true), Err(RefuseReason::UnknownRequest));
    world.offer("a", 0, 16, &[]);
    assert_eq!(world.asks("a", 16, true), Err(RefuseReason::Protocol), "one offer each");
}

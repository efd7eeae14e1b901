use super::*;
use futures::FutureExt as _;

impl Admission {
    fn enter(&self, priority: i32) -> Result<Slot, RequestError> {
        self.enter_as(1, priority)
    }

    /// One sample of a tenant with one key.
    fn enter_as(&self, tenant: u8, priority: i32) -> Result<Slot, RequestError> {
        Ok(self.enter_all(1, priority, Some([tenant; 32]), share(tenant, 1))?.remove(0))
    }
}

fn share(tenant: u8, weight: u32) -> Share {
    Share { tenant: TenantLabel(tenant.into()), weight: Weight::try_new(weight).unwrap() }
}

fn runs(slot: &mut Slot) -> bool {
    slot.turn().now_or_never().is_some_and(|turn| turn.is_ok())
}

#[test]
fn over_the_limit_is_refused_and_places_come_back() {
    let admission = Admission::new(1, 1);
    let mut first = admission.enter(0).unwrap();
    first.turn().now_or_never().unwrap().unwrap();
    let mut second = admission.enter(0).unwrap();
    assert!(second.turn().now_or_never().is_none(), "the second waits");
    let error = admission.enter(0).unwrap_err();
    assert_eq!((error.kind, error.retry_after), (ErrorKind::Overloaded, Some(RETRY_AFTER)));
    drop(first);
    second.turn().now_or_never().unwrap().unwrap();
    assert_eq!(admission.inside(), 1);
    drop(second);
    assert_eq!(admission.inside(), 0);
}

#[test]
fn samples_enter_together_or_not_at_all() {
    let admission = Admission::new(1, 3);
    let one = admission.enter(0).unwrap();
    assert_eq!(admission.enter_all(4, 0, Some([1; 32]), share(1, 1)).unwrap_err().kind, ErrorKind::Overloaded);
    assert_eq!(admission.inside(), 1);
    let three = admission.enter_all(3, 0, Some([1; 32]), share(1, 1)).unwrap();
    assert_eq!((three.len(), admission.inside()), (3, 4));
    assert_eq!(
        admission.enter_all(5, 0, Some([1; 32]), share(1, 1)).unwrap_err().param.as_deref(),
        Some("n"),
        "it could never enter"
    );
    drop((one, three));
    assert_eq!(admission.inside(), 0);
}

#[test]
fn samples_that_find_too_few_places_send_nobody_away() {
    let admission = Admission::new(1, 2);
    let mut running = admission.enter(0).unwrap();
    running.turn().now_or_never().unwrap().unwrap();
    let mut waiting: Vec<Slot> = [0, 0].map(|priority| admission.enter(priority).unwrap()).into();
    waiting.iter_mut().for_each(|slot| assert!(slot.turn().now_or_never().is_none()));
    assert_eq!(admission.enter_all(3, 5, Some([1; 32]), share(1, 1)).unwrap_err().kind, ErrorKind::Overloaded);
    waiting.iter_mut().for_each(|slot| assert!(slot.turn().now_or_never().is_none(), "it waits as before"));
    let urgent = admission.enter_all(2, 5, Some([1; 32]), share(1, 1)).unwrap();
    waiting.iter_mut().for_each(|slot| assert!(slot.turn().now_or_never().unwrap().is_err()));
    drop((running, urgent, waiting));
    assert_eq!(admission.inside(), 0);
}

#[test]
fn a_full_queue_sends_the_youngest_of_the_lowest_priority_away() {
    let admission = Admission::new(1, 3);
    let mut running = admission.enter(-9).unwrap();
    running.turn().now_or_never().unwrap().unwrap();
    let mut waiting: Vec<Slot> = [0, -1, -1].map(|priority| admission.enter(priority).unwrap()).into();
    for slot in &mut waiting {
        assert!(slot.turn().now_or_never().is_none());
    }
    assert!(admission.enter(-1).is_err(), "nobody waits with a lower one");
    let mut urgent = admission.enter(5).unwrap();
    assert!(urgent.turn().now_or_never().is_none());
    let error = waiting[2].turn().now_or_never().unwrap().unwrap_err();
    assert_eq!((error.kind, error.retry_after), (ErrorKind::Overloaded, Some(RETRY_AFTER)));
    // One that leaves before it learns that it lost its slot.
    let another = admission.enter(5).unwrap();
    waiting.truncate(1);
    assert_eq!(admission.inside(), 4);
    drop((running, another));
    urgent.turn().now_or_never().unwrap().unwrap();
    assert!(waiting[0].turn().now_or_never().is_none());
    drop((urgent, waiting));
    assert_eq!((admission.inside(), admission.0.state.lock().running), (0, 0));
}

#[test]
fn no_key_takes_the_place_of_what_another_has_queued() {
    let admission = Admission::new(1, 3);
    // All of one tenant.
    let enter = |key: u8, priority: i32| admission.enter_all(1, priority, Some([key; 32]), share(1, 1));
    let mut running = enter(1, 0).unwrap().remove(0);
    running.turn().now_or_never().unwrap().unwrap();
    let mut waiting: Vec<Slot> = [(1, -5), (2, -9), (2, 0)].map(|(key, p)| enter(key, p).unwrap().remove(0)).into();
    waiting.iter_mut().for_each(|slot| assert!(slot.turn().now_or_never().is_none()));
    assert_eq!(enter(3, 100).unwrap_err().kind, ErrorKind::Overloaded);
    assert_eq!(admission.enter_all(2, 100, Some([1; 32]), share(1, 1)).unwrap_err().kind, ErrorKind::Overloaded);
    let _own = enter(1, 100).unwrap();
    let waits: Vec<bool> = waiting.iter_mut().map(|slot| slot.turn().now_or_never().is_none()).collect();
    assert_eq!(waits, [false, true, true], "its own, though another's is lower");
}

#[test]
fn turns_go_by_priority_then_by_arrival_and_are_not_lost_with_who_leaves() {
    let admission = Admission::new(1, 10);
    let mut running = admission.enter(0).unwrap();
    running.turn().now_or_never().unwrap().unwrap();
    let mut waiting: Vec<Slot> = [0, 5, 0, 5, -1].map(|priority| admission.enter(priority).unwrap()).into();
    for slot in &mut waiting {
        assert!(slot.turn().now_or_never().is_none());
    }
    drop(running);
    // Notified, but dropped before it received that; then one that was never notified.
    drop(waiting.remove(1));
    drop(waiting.remove(1));
    // The other 5, the 0, the -1.
    for expected in [1, 0, 0] {
        let running: Vec<bool> = waiting.iter_mut().map(|slot| slot.turn().now_or_never().is_some()).collect();
        assert_eq!(running.iter().position(|r| *r), Some(expected), "{running:?}");
        assert_eq!(running.iter().filter(|r| **r).count(), 1);
        waiting.remove(expected);
    }
    assert_eq!(admission.inside(), 0);
    assert_eq!(admission.0.state.lock().running, 0);
}

#[test]
fn a_tenant_below_its_share_enters_where_another_has_all_slots() {
    let admission = Admission::new(2, 2);
    let enter = |tenant, samples| admission.enter_all(samples, 0, Some([tenant; 32]), share(tenant, 1));
    let flood: Vec<Slot> = (0..4).flat_map(|_| enter(1, 1).unwrap()).collect();
    assert_eq!(enter(1, 1).unwrap_err().kind, ErrorKind::Overloaded, "alone, it has no share beyond all");
    let one = enter(2, 1).unwrap();
    assert_eq!(enter(1, 1).unwrap_err().kind, ErrorKind::Overloaded);
    let two = enter(2, 1).unwrap();
    assert_eq!(enter(2, 1).unwrap_err().kind, ErrorKind::Overloaded, "its share is two of four");
    let others: Vec<Slot> = [3, 4].into_iter().flat_map(|tenant| enter(tenant, 1).unwrap()).collect();
    assert_eq!(admission.inside(), 8);
    assert_eq!(enter(5, 1).unwrap_err().kind, ErrorKind::Overloaded, "twice the bound is the bound");
    drop((flood, one, two, others));
    let state = admission.0.state.lock();
    assert_eq!((state.inside, state.running, state.weights, state.tenants.len()), (0, 0, 0, 0));
}

#[test]
fn all_samples_enter_or_none_where_another_has_all_slots() {
    let admission = Admission::new(2, 2);
    let _flood = admission.enter_all(4, 0, Some([1; 32]), share(1, 1)).unwrap();
    let slots = admission.enter_all(3, 0, Some([2; 32]), share(2, 1)).unwrap();
    assert_eq!((slots.len(), admission.inside()), (3, 7));
    assert!(admission.enter_all(2, 0, Some([3; 32]), share(3, 1)).is_err());
    assert_eq!(admission.inside(), 7);
}

#[test]
fn the_next_is_of_the_tenant_that_runs_the_fewest_for_its_weight() {
    let admission = Admission::new(4, 20);
    let enter = |tenant, weight| admission.enter_all(1, 0, None, share(tenant, weight)).unwrap().remove(0);
    let mut running: Vec<Slot> = (0..4).map(|_| enter(1, 1)).collect();
    assert!(running.iter_mut().all(runs));
    let mut waiting: Vec<(u8, Slot)> =
        [(1, 1), (1, 1), (2, 1), (2, 1), (3, 2), (3, 2), (3, 2)].map(|(t, w)| (t, enter(t, w))).into();
    assert!(!waiting.iter_mut().any(|(_, slot)| runs(slot)));
    let mut order = Vec::new();
    for _ in 0..4 {
        running.remove(0);
        let next = waiting.iter_mut().position(|(_, slot)| runs(slot)).unwrap();
        let (tenant, slot) = waiting.remove(next);
        order.push(tenant);
        running.push(slot);
    }
    // 2 and 3 have none, and 2 came first. Then 3 has half of its weight.
    assert_eq!(order, [2, 3, 3, 1]);
    let mut urgent = admission.enter_as(1, 9).unwrap();
    assert!(!runs(&mut urgent));
    running.remove(0);
    assert!(runs(&mut urgent), "priority comes first");
}

#[test]
fn a_standing_is_a_tenants_among_those_inside() {
    let admission = Admission::new(50, 50);
    let enter = |tenant, weight| admission.enter_all(1, 0, None, share(tenant, weight)).unwrap();
    let _flood: Vec<_> = (0..5).map(|_| enter(1, 1)).collect();
    assert_eq!(admission.standing(share(1, 1)), Standing::ALONE);
    let mut others = vec![enter(2, 3)];
    let standings = || [share(1, 1), share(2, 3)].map(|share| admission.standing(share));
    let expected =
        |first, second| [(0.25, first), (0.75, second)].map(|(share, is_below)| Standing { share, is_below });
    assert_eq!(standings(), expected(false, true));
    others.extend((0..12).map(|_| enter(2, 3)));
    assert_eq!(standings(), expected(false, true), "13 of 18 are less than three quarters");
    others.extend((0..12).map(|_| enter(2, 3)));
    assert_eq!(standings(), expected(true, false));
}

/// The order in which requests of these tenants run one at a time, after one of `first`.
fn turns(first: u8, tenants: &[u8]) -> Vec<u8> {
    let admission = Admission::new(1, 9);
    let mut running = admission.enter_as(first, 0).unwrap();
    assert!(runs(&mut running));
    let enter = |tenant: &u8| (*tenant, admission.enter_as(*tenant, 0).unwrap());
    let mut waiting: Vec<(u8, Slot)> = tenants.iter().map(enter).collect();
    let mut order = Vec::new();
    while !waiting.is_empty() {
        assert!(!waiting.iter_mut().any(|(_, slot)| runs(slot)));
        drop(running);
        let next = waiting.iter_mut().position(|(_, slot)| runs(slot)).unwrap();
        let (tenant, slot) = waiting.remove(next);
        order.push(tenant);
        running = slot;
    }
    order
}

#[test]
fn tenants_that_run_as_few_take_turns() {
    assert_eq!(turns(1, &[1, 1, 2, 2]), [2, 1, 2, 1]);
}

#[test]
fn tenants_that_come_and_go_starve_nobody() {
    let admission = Admission::new(1, 9);
    let enter = |tenant: u8| {
        let mut slot = admission.enter_as(tenant, 0).unwrap();
        assert!(!runs(&mut slot));
        (tenant, slot)
    };
    let mut running = (1, admission.enter_as(1, 0).unwrap());
    assert!(runs(&mut running.1));
    // Tenant 1 stays and waits for its second turn. The others leave after each turn, and come back.
    let mut waiting = vec![enter(1), enter(2), enter(3)];
    let mut order = Vec::new();
    for _ in 0..6 {
        let (left, slot) = running;
        drop(slot);
        let next = waiting.iter_mut().position(|(_, slot)| runs(slot)).unwrap();
        running = waiting.remove(next);
        order.push(running.0);
        waiting.push(enter(left));
    }
    assert_eq!(order[..3], [2, 3, 1], "{order:?}");
}

#[test]
fn a_higher_priority_displaces_its_own_while_others_are_inside_beyond_the_limit() {
    let admission = Admission::new(2, 2);
    let mut running = [0, 0].map(|priority| admission.enter_as(1, priority).unwrap());
    assert!(running.iter_mut().all(runs));
    let mut waiting = [0, 0].map(|priority| admission.enter_as(1, priority).unwrap());
    assert!(!waiting.iter_mut().any(runs));
    let other = admission.enter_as(2, 0).unwrap();
    assert_eq!(admission.inside(), 5, "within its share, it enters a full router");
    assert!(admission.enter_as(1, 0).is_err(), "nobody waits with a lower priority");
    let urgent = admission.enter_as(1, 5).unwrap();
    assert_eq!(admission.inside(), 5);
    assert!(waiting[1].turn().now_or_never().unwrap().is_err(), "the youngest gave its slot");
    drop((running, waiting, other, urgent));
    assert_eq!(admission.inside(), 0);
}

#[test]
fn the_latest_weight_of_a_tenant_counts_and_goes_with_it() {
    let admission = Admission::new(2, 6);
    let enter = |tenant, weight| admission.enter_all(1, 0, None, share(tenant, weight)).unwrap();
    let slots = [enter(1, 1), enter(2, 1), enter(1, 3)];
    assert_eq!(admission.standing(share(2, 1)).share, 0.25);
    drop(slots);
    let state = admission.0.state.lock();
    assert_eq!((state.weights, state.tenants.len()), (0, 0));
}

#[test]
fn one_request_is_within_the_smallest_share() {
    let admission = Admission::new(2, 6);
    let enter = |tenant, weight| admission.enter_all(1, 0, None, share(tenant, weight)).unwrap();
    let _heavy = enter(1, 999);
    let _first = enter(2, 1);
    assert!(admission.standing(share(2, 1)).is_below, "a thousandth of two requests is less than one");
    let _second = enter(2, 1);
    assert!(!admission.standing(share(2, 1)).is_below);
}

#[test]
fn of_tenants_that_come_during_one_turn_the_first_is_served_first() {
    // Neither in the order of their labels nor against it.
    assert_eq!(turns(5, &[3, 9, 1]), [3, 9, 1]);
}

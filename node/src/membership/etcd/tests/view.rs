//! The pure view, tested with scripts.

use crate::membership::conformance::record;
use crate::membership::etcd::view::{Change, EtcdView, Position, ViewLimits};
use crate::membership::{Member, Registration};
use baton_types::{InstanceId, Party};
use std::sync::Arc;
use std::time::{Duration, Instant};

const LIMITS: ViewLimits = ViewLimits {
    grace: Duration::from_secs(10),
    settle: Duration::from_millis(300),
    window: Duration::from_secs(2),
    probe_every: Duration::from_secs(1),
    members_max: 4,
};

/// `a1` is instance a in incarnation 1.
fn member(who: &str, revision: i64) -> Member {
    let (instance, incarnation) = who.split_at(1);
    let record = record(instance, incarnation.parse().unwrap());
    let registration = Registration { incarnation: record.party.incarnation, revision: revision as u64 };
    Member { record: Arc::new(record), registration }
}

fn party(who: &str) -> Party {
    member(who, 0).record.party.clone()
}

/// Steps over [`LIMITS`].
fn run(script: &str) -> String {
    run_with(LIMITS, script)
}

/// Steps `second:op`: `L5@a1,b1` lists at revision 5 in the first history, `W5@…` in another epoch; `+a1` and `-a,b`
/// are watch events; `?` asks which members are due, `yes:a1` and `no:a1` are answers; `.` only lets time pass. Each
/// step shows the members, a question mark after each suspected one, and a plus if a list is wanted.
fn run_with(limits: ViewLimits, script: &str) -> String {
    let start = Instant::now();
    let (mut view, mut revision) = (EtcdView::new(limits, 0), 10);
    let mut out = Vec::new();
    for step in script.split_whitespace() {
        let (second, op) = step.split_once(':').unwrap();
        let now = start + Duration::from_secs_f64(second.parse().unwrap());
        revision += 1;
        let before = view.view();
        view.settle(now);
        let mut due = String::new();
        if let Some((kind, list)) = op.split_once('@') {
            let (epoch, at) = kind.split_at(1);
            let epoch = if epoch == "L" { 1 } else { 2 };
            let at = at.parse().unwrap();
            let members = list.split(',').filter(|w| !w.is_empty()).map(|w| member(w, at)).collect();
            view.listed(Position { cluster: 1, epoch, revision: at }, members, now);
            revision = at;
        } else if let Some((verdict, who)) = op.split_once(':') {
            view.answered(&party(who), verdict == "yes");
        } else if op == "?" {
            let asked: Vec<_> = view.due(now, 16).iter().map(|r| r.party.instance.to_string()).collect();
            due = format!("ask({})", asked.join(" "));
        } else if op != "." {
            let (sign, who) = op.split_at(1);
            let change = |who: &str| match sign {
                "+" => Change::Put(member(who, revision)),
                _ => Change::Deleted(InstanceId::try_new(who).unwrap()),
            };
            view.changed(revision, who.split(',').map(change).collect(), now);
        }
        let after = view.view();
        assert_eq!(before.members != after.members, view.revision() > before.revision, "{step}");
        let names: Vec<_> = after
            .members
            .values()
            .map(|m| format!("{}{}", m.record.party.instance, m.registration.incarnation.0))
            .collect();
        let wants = if view.wants_list() { "+" } else { "" };
        out.push(format!("{due}[{}]{}{wants}", names.join(" "), "?".repeat(view.doubted())));
    }
    out.join(" ")
}

#[test]
fn scripts() {
    let check = |script: &str, expected: &str| assert_eq!(run(script), expected, "{script}");
    check("0:L5@a1,b1 1:+c1 2:+a2 9:-b 9.4:.", "[a1 b1] [a1 b1 c1] [a2 b1 c1] [a2 b1 c1] [a2 c1]");
    // It leaves only after a while, and not if it registers again meanwhile.
    check("0:L5@a1,b1,c1 9:-a 9.2:. 9.3:.", "[a1 b1 c1] [a1 b1 c1] [a1 b1 c1] [b1 c1]");
    check("0:L5@a1,b1,c1 9:-a 9.2:+a1 9.9:.", "[a1 b1 c1] [a1 b1 c1] [a1 b1 c1] [a1 b1 c1]");
    // A list after a compaction: records that it lacks were deleted, one at a time.
    check("0:L5@a1,b1,c1 9:L9@a1,c1,d1 9.2:L9@a1,c1,d1 9.4:.", "[a1 b1 c1] [a1 b1 c1 d1] [a1 b1 c1 d1] [a1 c1 d1]");
    // Most at once: they are suspected until asked; those that answer stay and are asked again.
    check(
        "0:L5@a1,b1,c1 9:-a,b,c 9:? 9.1:no:a1 9.1:yes:b1 9.5:? 10:? 11:+c1 12:no:c1",
        "[a1 b1 c1] [a1 b1 c1]??? ask(a b c)[a1 b1 c1]??? [b1 c1]?? [b1 c1]?? ask()[b1 c1]?? ask(b c)[b1 c1]?? [b1 c1]? [b1 c1]?",
    );
    check("0:L5@a1,b1,c1 9:L9@ 9:no:a1 9:no:b1 9:no:c1", "[a1 b1 c1] [a1 b1 c1]??? [b1 c1]?? [c1]? []");
    // The same one by one: nobody leaves. More slowly, but within the window: the first leaves, until the second
    // vanishes. Slowly, each leaves.
    check("0:L5@a1,b1,c1 9:-a 9.1:-b 9.2:-c", "[a1 b1 c1] [a1 b1 c1] [a1 b1 c1]?? [a1 b1 c1]???");
    check("0:L5@a1,b1,c1 9:-a 9.4:. 9.5:-b 10:-c", "[a1 b1 c1] [a1 b1 c1] [b1 c1] [a1 b1 c1]?? [a1 b1 c1]???");
    check("0:L5@a1,b1,c1 9:-a 19:-b 29:-c 30:.", "[a1 b1 c1] [a1 b1 c1] [b1 c1] [c1] []");
    // A member that registered again, or was asked and is gone, does not count any more: a cluster may be restarted or
    // emptied one by one.
    check(
        "0:L5@a1,b1,c1 9:-a 9.2:+a2 9.4:-b 9.6:+b2 9.8:-c",
        "[a1 b1 c1] [a1 b1 c1] [a2 b1 c1] [a2 b1 c1] [a2 b2 c1] [a2 b2 c1]",
    );
    check(
        "0:L5@a1,b1,c1 9:-a 9.1:-b 9.2:? 9.3:no:a1 9.3:no:b1 9.4:-c 9.8:.",
        "[a1 b1 c1] [a1 b1 c1] [a1 b1 c1]?? ask(a b)[a1 b1 c1]?? [b1 c1]? [c1] [c1] []",
    );
    // A few of many leave at once, however quickly they vanish.
    check("0:L5@a1,b1,c1,d1 9:-a 9.1:-b 9.4:.", "[a1 b1 c1 d1] [a1 b1 c1 d1] [a1 b1 c1 d1] [c1 d1]");
    // Wiped: every member stays for the grace, then registers again or is asked.
    check("0:L5@a1,b1 1:W2@ 2:+a1 10:? 11:? 11:no:b1", "[a1 b1] [a1 b1]?? [a1 b1]? ask()[a1 b1]? ask(b)[a1 b1]? [a1]");
    // The revision is lower under the same epoch: restored.
    check("0:L50@a1,b1 1:L20@a1", "[a1 b1] [a1 b1]?");
    // Even if a record had been removed just before.
    check("0:L50@a1,b1,c1 1:-c 1.1:L20@a1,b1 2:.", "[a1 b1 c1] [a1 b1 c1] [a1 b1 c1]? [a1 b1 c1]?");
    // Who left in the other history does not count in this one.
    check("0:L5@a1,b1,c1 1:-a 1.4:. 1.5:W2@b1,c1 2:-b 2.4:.", "[a1 b1 c1] [a1 b1 c1] [b1 c1] [b1 c1] [b1 c1] [c1]");
    // Restored from before a's restart: the live incarnation stays, the old one's lease ends.
    check("0:L50@a2,b1 1:L20@a1,b1 5:-a 6:+a2", "[a2 b1] [a2 b1]? [a2 b1]? [a2 b1]");
    // Wiped, and a restarted meanwhile: the new incarnation takes over once the old one is gone.
    check("0:L50@a1 1:W9@a2 11:? 11:no:a1", "[a1] [a1]? ask(a)[a1]? [a2]");
    check("0:L50@a1 1:W9@a2 2:+a2", "[a1] [a1]? [a2]");
    // Bounded.
    check("0:L5@a1,b1,c1,d1,e1 1:+a2", "[a1 b1 c1 d1] [a2 b1 c1 d1]");
}

#[test]
fn who_was_left_out_is_listed_once_there_is_room() {
    let one = ViewLimits { members_max: 1, ..LIMITS };
    let check = |script: &str, expected: &str| assert_eq!(run_with(one, script), expected, "{script}");
    check("0:L5@a1 1:+b1 9:-a 10:. 10:L9@b1", "[a1] [a1] [a1] []+ [b1]");
    check("0:L5@a1,b1 9:-a 10:. 10:L9@b1", "[a1] [a1] []+ [b1]");
    // No record was left out, or none remains.
    check("0:L5@a1 9:-a 10:.", "[a1] [a1] []");
    check("0:L5@a1,b1 9:-b,a 10:. 10:L9@", "[a1] [a1] []+ []");
    // A suspected member keeps its place until its probe has ended.
    check("0:L5@a1 1:W9@b1 2:no:a1", "[a1] [a1]? []+");
}

#[test]
fn a_watch_goes_on_only_in_the_same_history() {
    let mut view = EtcdView::new(LIMITS, 0);
    let at = Position { cluster: 1, epoch: 1, revision: 50 };
    assert!(!view.continues(at), "there is nothing to go on from");
    view.listed(at, vec![], Instant::now());
    assert!(view.continues(at) && view.continues(Position { revision: 70, ..at }));
    for other in [Position { revision: 49, ..at }, Position { epoch: 2, ..at }, Position { cluster: 2, ..at }] {
        assert!(!view.continues(other), "{other:?}");
    }
}

/// Workers' answers may arrive after that of etcd.
#[test]
fn once_etcd_was_heard_nothing_is_recalled() {
    let mut view = EtcdView::new(LIMITS, 0);
    let before = Position { cluster: 1, epoch: 1, revision: 40 };
    view.add_offline(member("a1", 3), Some(before));
    assert_eq!((view.view().members.len(), view.unconfirmed(), view.position()), (1, Some(1), Some(before)));
    view.listed(Position { revision: 50, ..before }, vec![member("a2", 50)], Instant::now());
    let (known, revision) = (view.view().members.clone(), view.revision());
    for late in ["a1", "b1"] {
        view.add_offline(member(late, 3), Some(before));
    }
    assert_eq!((view.view().members.clone(), view.revision()), (known, revision));
    assert_eq!((view.unconfirmed(), view.position().unwrap().revision), (None, 50));
}

//! Sinks that record what they are given.

use super::parts::{Cached, none_cached};
use super::pool::{Hold, Pool};
use baton_kv_transfer::shards::Assembly;
use baton_kv_transfer::*;
use baton_types::*;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// What a sink does with an offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// Grants at once.
    Ready,
    /// Keeps the reply until [`TestSink::answer`].
    Later,
    /// Grants what is claimed, once.
    Claimed,
    /// Drops the reply.
    None,
    Panic,
}

/// What the shards of an instance share.
pub struct Joint {
    pub assembly: Assembly,
    pub adopted: Mutex<HashMap<String, Vec<VerifiedHandoff>>>,
    pub transfers: Mutex<Vec<KvTransfer>>,
}

pub struct TestSink {
    pool: Arc<Pool>,
    map: KvPoolMap,
    seed: u64,
    pub room: Mutex<Room>,
    pub adopt: Mutex<Result<(), String>>,
    /// What is here already of an offer.
    pub cached: Mutex<Cached>,
    waiting: Mutex<Vec<(ReserveOffer, GrantReply)>>,
    claims: Mutex<Vec<(String, Party, u32)>>,
    adopted: Mutex<HashMap<String, VerifiedHandoff>>,
    failed: Mutex<Vec<(String, HandoffFailure)>>,
    /// What peers may read, by name.
    served: Mutex<HashMap<Vec<u8>, Arc<Hold>>>,
    shard: HeadShard,
    joint: Option<Arc<Joint>>,
}

impl TestSink {
    /// Has room, adopts everything, has nothing cached and serves nothing.
    pub fn new(pool: &Arc<Pool>, map: &KvPoolMap, seed: u64, shard: HeadShard, joint: Option<Arc<Joint>>) -> Arc<Self> {
        Arc::new(Self {
            pool: pool.clone(),
            map: map.clone(),
            seed,
            room: Mutex::new(Room::Ready),
            adopt: Mutex::new(Ok(())),
            cached: Mutex::new(none_cached()),
            waiting: Mutex::default(),
            claims: Mutex::default(),
            adopted: Mutex::default(),
            failed: Mutex::default(),
            served: Mutex::default(),
            shard,
            joint,
        })
    }

    /// Lets peers get these blocks under this name.
    pub fn serve(&self, name: &str, blocks: Box<Hold>) {
        self.served.lock().unwrap().insert(name.as_bytes().to_vec(), Arc::from(blocks));
    }

    /// Their blocks are back once nobody reads them.
    pub fn evict(&self, name: &str) {
        self.served.lock().unwrap().remove(name.as_bytes());
    }

    fn grant(&self, offer: &ReserveOffer, reply: GrantReply) {
        let count = self.map.layout().blocks_for(offer.tokens as usize);
        match self.pool.take(count, self.seed) {
            Some(mut hold) => {
                hold.cached = (self.cached.lock().unwrap())(offer);
                reply.grant(hold);
            }
            None => reply.refuse(RefuseReason::NoRoom, "the pool is full"),
        }
    }

    /// Answers what waits.
    pub fn answer(&self) {
        for (offer, reply) in std::mem::take(&mut *self.waiting.lock().unwrap()) {
            self.grant(&offer, reply);
        }
    }

    /// From now on only what is claimed is granted: by request, source and tokens, as decode workers do.
    pub fn claim(&self, request: &str, source: &Party, tokens: u32) {
        *self.room.lock().unwrap() = Room::Claimed;
        self.claims.lock().unwrap().push((request.to_owned(), source.clone(), tokens));
    }

    fn grant_if_claimed(&self, offer: &ReserveOffer, reply: GrantReply) {
        let wanted = (offer.request_id.as_str().to_owned(), offer.source.clone(), offer.tokens);
        let mut claims = self.claims.lock().unwrap();
        match claims.iter().position(|claim| *claim == wanted) {
            Some(at) => {
                claims.swap_remove(at);
                self.grant(offer, reply);
            }
            None => reply.refuse(RefuseReason::UnknownRequest, "no such claim stands"),
        }
    }

    fn take_in(&self, handoff: VerifiedHandoff) -> Result<(), String> {
        self.adopt.lock().unwrap().clone()?;
        let name = handoff.request_id.as_str().to_owned();
        assert!(self.adopted.lock().unwrap().insert(name, handoff).is_none(), "adopted twice");
        Ok(())
    }

    pub fn waiting(&self) -> usize {
        self.waiting.lock().unwrap().len()
    }

    pub fn take_adopted(&self, request: &str) -> Option<VerifiedHandoff> {
        self.adopted.lock().unwrap().remove(request)
    }

    pub fn failures(&self) -> Vec<(String, HandoffFailure)> {
        self.failed.lock().unwrap().clone()
    }
}

impl SinkHandler for TestSink {
    fn reserve(&self, offer: ReserveOffer, reply: GrantReply) {
        match *self.room.lock().unwrap() {
            Room::Ready => self.grant(&offer, reply),
            Room::Later => self.waiting.lock().unwrap().push((offer, reply)),
            Room::Claimed => self.grant_if_claimed(&offer, reply),
            Room::None => {}
            Room::Panic => panic!("as the test asks"),
        }
    }
    fn verified(&self, handoff: VerifiedHandoff, reply: AdoptReply) {
        let Some(joint) = &self.joint else { return reply.answer(self.take_in(handoff)) };
        let name = handoff.request_id.as_str().to_owned();
        joint.assembly.arrived(self.shard.index(), handoff, reply, |parts| {
            assert!(joint.adopted.lock().unwrap().insert(name, parts).is_none(), "adopted twice");
            Ok(())
        });
    }
    fn failed(&self, offer: &ReserveOffer, reason: HandoffFailure) {
        let request_id = &offer.request_id;
        self.failed.lock().unwrap().push((request_id.as_str().to_owned(), reason));
        if let Some(joint) = &self.joint {
            joint.assembly.failed(request_id);
            let shards = joint.transfers.lock().unwrap();
            shards.iter().for_each(|transfer| transfer.cancel(request_id, "another shard failed"));
        }
    }
    fn pin(&self, question: PinQuestion, reply: PinReply) {
        let held = self.served.lock().unwrap().get(&question.name).cloned();
        match held {
            Some(hold) => reply.pin(hold.blocks_from(question.from), Box::new(hold)),
            None => reply.refuse(RefuseReason::UnknownRequest, "no such name"),
        }
    }
}

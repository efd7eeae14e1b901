//! The epoll set to which the worker of one connection reports. It is a member of the set on which the transport sleeps, while there is room
//! for what the lanes bring. Without room it is none: the worker is not progressed, so it would report the same events all the time.
//!
//! Connections over host memory always have room. Their workers report to the transport's set directly.

use crate::transport::tcp::LANES;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use std::cell::Cell;
use std::io::Error;
use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::Rc;

pub(super) struct LaneEvents {
    own: Rc<OwnedFd>,
    /// The set of the transport.
    all: Rc<OwnedFd>,
    is_member: Cell<bool>,
}

impl LaneEvents {
    /// A member of `all`. It leaves that set when it is dropped with its worker.
    pub(super) fn new(all: &Rc<OwnedFd>) -> Result<Self, Error> {
        let own = Rc::new(epoll::create(CreateFlags::CLOEXEC)?);
        let events = Self { own, all: all.clone(), is_member: Cell::new(false) };
        events.listen(true)?;
        Ok(events)
    }

    /// The set, for [`crate::ucx::Worker::new`].
    pub(super) fn own(&self) -> Rc<dyn AsRawFd> {
        self.own.clone()
    }

    /// Whether events of the worker end a sleep of the transport. Level-triggered, so what came before does too.
    pub(super) fn listen(&self, listens: bool) -> Result<(), Error> {
        if self.is_member.get() == listens {
            return Ok(());
        }
        match listens {
            true => epoll::add(&*self.all, &*self.own, EventData::new_u64(LANES.0 as u64), EventFlags::IN)?,
            false => epoll::delete(&*self.all, &*self.own)?,
        }
        self.is_member.set(listens);
        Ok(())
    }
}

//! Streams from routers to workers: words in order, both ways, until one end lets go or dies.

use super::clock::{Addr, Fifo, Time, ms};
use super::event::{Event, Said, Trouble};
use super::world::World;
use baton_types::{ErrorKind, Party, RequestId, Role, TokenId};

/// A silent peer is noticed after this.
const KEEPALIVE: Time = ms(600);

/// A stream from a router to a worker, and what it asks for.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) role: Role,
    pub(super) name: RequestId,
    pub(super) request: usize,
    pub(super) attempt: u32,
    pub(super) tokens: Vec<TokenId>,
    pub(super) prompt_len: usize,
    pub(super) max_tokens: usize,
    pub(super) priority: i32,
    pub(super) deadline: Time,
    /// The prefill worker whose KV a decode worker is to wait for.
    pub(super) source: Option<Party>,
    /// The decode worker that a prefill is for.
    pub(super) sink: Addr,
    pub(super) router: Addr,
    pub(super) worker: Addr,
    pub(super) router_open: bool,
    pub(super) worker_open: bool,
    pub(super) there: Fifo,
    pub(super) back: Fifo,
}

/// What a worker is asked for.
pub(super) enum Wanted {
    /// To generate, from KV of this prefill worker where one is named.
    Decode { source: Option<Party> },
    /// To prefill for the decode worker that stands there.
    Prefill { sink: Addr },
}

impl World {
    /// Opens a stream to a worker, at its address.
    pub(super) fn call(&mut self, r: usize, (request, attempt): (usize, u32), to: &Party, wanted: Wanted) -> usize {
        let (role, source, sink) = match wanted {
            Wanted::Decode { source } => (Role::Decode, source, Addr::WORLD),
            Wanted::Prefill { sink } => (Role::Prefill, None, sink),
        };
        let router = self.addr(r);
        let sent = self.flow(r, request).map(|flow| flow.tokens.clone()).unwrap_or_default();
        let spec = &self.requests[request];
        let name = if self.mutant.reuses_names() {
            format!("r{request}")
        } else {
            format!("r{request}.{attempt}.{}", router.incarnation)
        };
        let name = RequestId::try_new(name).expect("a short name");
        let process = self.instances[&to.instance];
        let call = Call {
            role,
            name,
            request,
            attempt,
            tokens: [&spec.prompt[..], &sent].concat(),
            prompt_len: spec.prompt.len(),
            max_tokens: spec.max_tokens,
            priority: spec.priority,
            deadline: spec.deadline,
            source,
            sink,
            router,
            worker: Addr::whoever(process),
            router_open: true,
            worker_open: false,
            there: Fifo::default(),
            back: Fifo::default(),
        };
        self.calls.push(call);
        let call = self.calls.len() - 1;
        let at = self.clock.now() + self.delay();
        let at = self.calls[call].there.arrive(at);
        if self.procs[process].is_up {
            self.clock.post(at, Addr::whoever(process), Event::Open { call });
            self.watch_sign(call, process);
        } else {
            self.clock.post(at, router, Event::Broken { call });
        }
        call
    }

    /// A worker that stands still gives no sign of life.
    pub(super) fn watch_sign(&mut self, call: usize, process: usize) {
        if let Some(stops) = self.procs[process].stalled {
            let (at, to) = (self.clock.now() + KEEPALIVE, self.calls[call].router);
            self.clock.post(at, to, Event::NoSign { call, stops });
        }
    }

    /// A worker's words on their way to the router.
    pub(super) fn send_said(&mut self, from: Addr, call: usize, said: Said) {
        let at = self.clock.now() + self.delay();
        let c = &mut self.calls[call];
        if c.worker == from {
            let at = c.back.arrive(at);
            self.clock.post(at, c.router, Event::Said { call, said });
        }
    }

    /// The router lets a stream go.
    pub(super) fn close(&mut self, call: usize) {
        let at = self.clock.now() + self.delay();
        let c = &mut self.calls[call];
        if std::mem::take(&mut c.router_open) {
            let (at, to) = (c.there.arrive(at), Addr::whoever(c.worker.process));
            self.clock.post(at, to, Event::HangUp { call });
        }
    }

    /// Streams of a process that died break at the other end.
    pub(super) fn break_calls_of(&mut self, dead: Addr, silent: bool) {
        for call in 0..self.calls.len() {
            let soon = if silent { KEEPALIVE } else { ms(20) };
            let at = self.clock.now() + self.draw(soon as usize) as Time;
            let c = &mut self.calls[call];
            if c.worker == dead && std::mem::take(&mut c.worker_open) {
                let at = c.back.arrive(at);
                self.clock.post(at, c.router, Event::Broken { call });
            } else if c.router == dead && std::mem::take(&mut c.router_open) {
                let at = c.there.arrive(at);
                self.clock.post(at, Addr::whoever(c.worker.process), Event::HangUp { call });
            }
        }
    }

    /// Streams to a process that stopped are watched.
    pub(super) fn watch_calls_of(&mut self, process: usize) {
        for call in 0..self.calls.len() {
            if self.calls[call].worker.process == process && self.calls[call].router_open {
                self.watch_sign(call, process);
            }
        }
    }

    /// No sign of life for too long, if it is the same stop still.
    pub(super) fn no_sign(&mut self, r: usize, call: usize, stops: u64) {
        let process = self.calls[call].worker.process;
        if self.procs[process].stalled == Some(stops) && self.calls[call].router_open {
            self.broken(r, call);
        }
    }

    /// A stream broke under the router.
    pub(super) fn broken(&mut self, r: usize, call: usize) {
        let lost = Trouble::new(ErrorKind::Unavailable);
        self.heard(r, call, Err(lost));
        self.close(call);
    }

    /// A word of a worker.
    pub(super) fn said(&mut self, r: usize, call: usize, said: Said) {
        let said = match said {
            Said::Error(trouble) => Err(trouble),
            said => Ok(said),
        };
        let stated = said.is_err();
        self.heard_stated(r, call, said, stated);
    }
}

//! What goes wrong, carried out.

use super::clock::{Addr, Time, ms};
use super::event::{Event, Fault};
use super::router::Router;
use super::world::{Node, World};
use baton_types::ErrorKind;

/// A silent peer counts as gone after this on the data plane.
const SILENT: Time = ms(450);

impl World {
    pub(super) fn fault(&mut self, fault: Fault) {
        match fault {
            Fault::Crash { process, silent } if self.procs[process].is_up => self.crash(process, silent),
            Fault::Restart { process } if !self.procs[process].is_up => self.start(process),
            Fault::Stall { process } if self.procs[process].is_up && self.procs[process].stalled.is_none() => {
                self.stall(process);
            }
            Fault::Resume { process } => self.resume(process),
            Fault::Cut { process, other } => {
                for conn in 0..self.net.connections.len() {
                    let c = &self.net.connections[conn];
                    let ends = [c.source.process, c.sink.process];
                    if ends.contains(&process) && ends.contains(&other) && !c.is_cut {
                        self.cut(conn);
                    }
                }
            }
            Fault::BreakWatch { .. } | Fault::Wipe { .. } | Fault::EtcdAway { .. } | Fault::LoseRecords
                if self.shape.is_embedded => {}
            Fault::BreakWatch { process } => self.break_watch(process),
            Fault::Wipe { all } => self.wipe(all),
            Fault::EtcdAway { ms } => self.etcd_goes_away(ms),
            Fault::LoseRecords => self.lose_records(),
            Fault::Damage { process } => {
                (self.was_damaged, self.may_break) = (true, true);
                self.net.damage.push(process);
            }
            Fault::DeviceFails { process } => (self.may_break, self.procs[process].device_fails) = (true, true),
            Fault::Pause { request } => self.pause(request),
            Fault::Heal => {
                self.net.damage.clear();
                for process in 0..self.procs.len() {
                    self.procs[process].device_fails = false;
                    self.resume(process);
                    if !self.procs[process].is_up {
                        self.start(process);
                    }
                }
            }
            Fault::Crash { .. } | Fault::Restart { .. } | Fault::Stall { .. } => {}
        }
    }

    /// A process begins, under a new incarnation.
    pub(super) fn start(&mut self, process: usize) {
        let state = &mut self.procs[process];
        (state.is_up, state.stalled) = (true, None);
        state.incarnation += 1;
        let here = self.addr(process);
        if process < self.shape.routers {
            let follows = if self.shape.is_embedded { Event::LookForEnds } else { Event::WatchAgain };
            self.procs[process].node = Node::Router(Box::new(Router::new(&self.shape)));
            self.post(here, follows);
        } else {
            let record = self.record(process);
            let worker = self.new_worker(process, record);
            self.procs[process].node = Node::Worker(Box::new(worker));
            self.post(here, Event::SendReports);
            self.post(here, Event::SendRenewal);
        }
    }

    fn crash(&mut self, process: usize, silent: bool) {
        let dead = self.addr(process);
        self.procs[process].is_up = false;
        self.procs[process].stalled = None;
        let lost = std::mem::take(&mut self.procs[process].backlog);
        lost.into_iter().for_each(|(_, event)| self.undelivered(event));
        self.break_calls_of(dead, silent);
        self.cut_all_of(dead, silent);
        if let Node::Router(router) = std::mem::replace(&mut self.procs[process].node, Node::Down) {
            // Its clients see their streams break.
            for request in router.flows.into_keys() {
                self.requests[request].ended(self.clock.now(), Some(ErrorKind::Unavailable));
                self.counts.add("request ends", "with its router");
            }
        }
    }

    fn stall(&mut self, process: usize) {
        self.stops += 1;
        let stops = self.stops;
        self.procs[process].stalled = Some(stops);
        self.watch_calls_of(process);
        for conn in 0..self.net.connections.len() {
            let c = &self.net.connections[conn];
            let peer = match (c.source.process == process, c.sink.process == process) {
                (true, _) => c.sink,
                (_, true) => c.source,
                _ => continue,
            };
            let at = self.clock.now() + SILENT + self.draw(ms(200) as usize) as Time;
            self.clock.post(at, peer, Event::Silent { conn, process, stops });
        }
    }

    fn resume(&mut self, process: usize) {
        if self.procs[process].stalled.take().is_some() {
            let waiting = std::mem::take(&mut self.procs[process].backlog);
            let now = self.clock.now();
            waiting.into_iter().for_each(|(to, event)| self.clock.post(now, to, event));
        }
    }

    /// The reader of an answer takes nothing for a while.
    fn pause(&mut self, request: usize) {
        let until = self.clock.now() + ms(200) + self.draw(ms(800) as usize) as Time;
        for process in self.shape.routers..self.procs.len() {
            let calls: Vec<usize> =
                self.calls.iter().enumerate().filter(|(_, c)| c.request == request).map(|(call, _)| call).collect();
            if let Some(worker) = self.worker_mut(process) {
                let of_it = worker.engine.sequences.values_mut().filter(|s| calls.contains(&s.call));
                of_it.for_each(|sequence| sequence.paused_until = until);
            }
        }
    }

    /// What nobody takes in.
    pub(super) fn undelivered(&mut self, event: Event) {
        match event {
            Event::Open { call } => {
                let to = self.calls[call].router;
                self.post(to, Event::Broken { call });
            }
            Event::Arrive(request) => {
                self.requests[request].ended(self.clock.now(), Some(ErrorKind::Unavailable));
                self.counts.add("request ends", "no router");
            }
            _ => {}
        }
    }

    /// A peer gave no sign of life for too long.
    pub(super) fn silent(&mut self, here: Addr, conn: usize, process: usize, stops: u64) {
        if self.procs[process].stalled == Some(stops) {
            self.connection_lost(here, conn);
        }
    }

    /// Each end of a connection lets go of what was on it.
    pub(super) fn connection_lost(&mut self, here: Addr, conn: usize) {
        let c = &self.net.connections[conn];
        let (is_source, is_sink) = (c.source == here && c.source_open, c.sink == here && c.sink_open);
        if is_source {
            let sink = c.sink;
            self.post(sink, Event::ConnectionLost { conn });
            self.sources_lost(here.process, conn);
        } else if is_sink {
            self.sinks_lost(here.process, conn);
        }
    }
}

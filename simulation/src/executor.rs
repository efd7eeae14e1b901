//! Virtual time and the tasks in it: one thread, one order of events for each seed.
//!
//! An event is a poll of a task or a call of a function, at an instant. Events of one instant run in an order drawn from the seed. The
//! poll of a woken task may be delayed a little, as threads and sockets delay it in a real process. Each event belongs to a [`Process`],
//! one start of a simulated process. A stalled process runs no events until it resumes, and a dead one none at all.

use crate::numbered::Numbered;
use crate::random::Random;
use baton_types::{BoxFuture, Clock, Runtime};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

/// Microseconds since the start of the schedule.
pub type Time = u64;

/// Milliseconds as [`Time`].
pub const fn ms(ms: u64) -> Time {
    ms * 1000
}

/// One start of a process, or the world outside of all processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Process(u64);

impl Process {
    /// The world outside of all processes: networks, devices, clients.
    pub const WORLD: Self = Self(0);
}

/// A function called at one instant.
type Call = Box<dyn FnOnce() + Send>;

enum Item {
    Poll(u64),
    Call(Process, Call),
    Wake(Waker),
}

/// What to do with the next item.
enum Due {
    Happen(Item),
    /// Its process is dead.
    Drop(Item),
}

struct Task {
    process: Process,
    /// `None` while it is polled.
    future: Option<BoxFuture<'static, ()>>,
    waker: Waker,
    /// A poll of it is scheduled.
    is_woken: bool,
}

#[derive(Default)]
struct Life {
    /// Items for a stalled process.
    held: Option<Vec<Item>>,
    is_dead: bool,
}

struct Schedule {
    now: Time,
    /// By instant, then by a random number, then by sequence number.
    items: BTreeMap<(Time, u32, u64), Item>,
    numbers: u64,
    tasks: Numbered<u64, Task>,
    /// Tasks woken by the current event.
    woken: BTreeSet<u64>,
    processes: Numbered<Process, Life>,
    process_numbers: u64,
    random: Random,
    /// Longest delay of a woken task, in microseconds.
    late_max: u64,
    steps: u64,
}

/// Runs the tasks of one schedule. Clones share the same executor.
#[derive(Clone)]
pub struct Executor {
    schedule: Arc<Mutex<Schedule>>,
    /// The instant of time 0; tasks only compare instants.
    origin: Instant,
}

struct TaskWaker {
    schedule: Weak<Mutex<Schedule>>,
    task: u64,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if let Some(schedule) = self.schedule.upgrade() {
            schedule.lock().wake(self.task);
        }
    }
}

impl Schedule {
    fn post(&mut self, at: Time, item: Item) -> (Time, u32, u64) {
        self.numbers += 1;
        let key = (at.max(self.now), self.random.any() as u32, self.numbers);
        self.items.insert(key, item);
        key
    }

    fn wake(&mut self, task: u64) {
        if let Some(woken) = self.tasks.get_mut(&task)
            && !std::mem::replace(&mut woken.is_woken, true)
        {
            self.woken.insert(task);
        }
    }

    /// Schedules polls of the woken tasks, sorted by number: channels wake their waiters in an order that does not depend on the seed.
    fn post_polls(&mut self) {
        for task in std::mem::take(&mut self.woken) {
            let late = if self.random.once_in(2) { 0 } else { self.random.below(self.late_max + 1) };
            self.post(self.now + late, Item::Poll(task));
        }
    }

    fn process_of(&self, item: &Item) -> Option<Process> {
        match item {
            Item::Poll(task) => self.tasks.get(task).map(|task| task.process),
            Item::Call(process, _) => Some(*process),
            Item::Wake(_) => Some(Process::WORLD),
        }
    }

    /// The next event, unless it is after `end`. Advances the time to it.
    fn next(&mut self, end: Time) -> Option<Due> {
        self.post_polls();
        loop {
            let entry = self.items.first_entry().filter(|entry| entry.key().0 <= end)?;
            let ((at, ..), item) = entry.remove_entry();
            self.now = at;
            let Some(process) = self.process_of(&item) else { continue };
            match self.processes.get_mut(&process) {
                Some(Life { is_dead: true, .. }) => return Some(Due::Drop(item)),
                Some(Life { held: Some(held), .. }) => held.push(item),
                _ => {
                    self.steps += 1;
                    return Some(Due::Happen(item));
                }
            }
        }
    }
}

impl Executor {
    /// An executor without events. A woken task is polled up to `late_max` later.
    pub fn new(seed: u64, late_max: Duration) -> Self {
        let schedule = Schedule {
            now: 0,
            items: BTreeMap::new(),
            numbers: 0,
            tasks: Numbered::default(),
            woken: BTreeSet::new(),
            processes: Numbered::default(),
            process_numbers: 0,
            random: Random::new(seed),
            late_max: late_max.as_micros() as u64,
            steps: 0,
        };
        Self { schedule: Arc::new(Mutex::new(schedule)), origin: Instant::now() }
    }

    /// Virtual time.
    pub fn time(&self) -> Time {
        self.schedule.lock().now
    }

    /// The instant `at`, as tasks see it.
    pub fn instant(&self, at: Time) -> Instant {
        self.origin + Duration::from_micros(at)
    }

    /// The time of a task's instant, rounded up so that no event is early.
    pub fn time_of(&self, at: Instant) -> Time {
        at.saturating_duration_since(self.origin).as_nanos().div_ceil(1000) as Time
    }

    /// Events so far: polls and calls.
    pub fn steps(&self) -> u64 {
        self.schedule.lock().steps
    }

    /// Draws from the seed.
    pub fn draw<T>(&self, draw: impl FnOnce(&mut Random) -> T) -> T {
        draw(&mut self.schedule.lock().random)
    }

    /// Starts a process.
    pub fn start(&self) -> Process {
        let mut schedule = self.schedule.lock();
        schedule.process_numbers += 1;
        let process = Process(schedule.process_numbers);
        schedule.processes.insert(process, Life::default());
        process
    }

    /// The runtime for tasks of `process`: time, timers and spawning.
    pub fn runtime(&self, process: Process) -> Arc<dyn Runtime> {
        Arc::new(OfProcess { executor: self.clone(), process })
    }

    /// Calls `call` at `at`, in `process`: after it resumes if it is stalled, and never if it is dead.
    pub fn call(&self, at: Time, process: Process, call: impl FnOnce() + Send + 'static) {
        self.schedule.lock().post(at, Item::Call(process, Box::new(call)));
    }

    /// Runs `task` in `process`.
    pub fn spawn(&self, process: Process, task: impl Future<Output = ()> + Send + 'static) {
        self.spawn_boxed(process, Box::pin(task));
    }

    fn spawn_boxed(&self, process: Process, future: BoxFuture<'static, ()>) {
        let mut schedule = self.schedule.lock();
        schedule.numbers += 1;
        let task = schedule.numbers;
        let waker = Waker::from(Arc::new(TaskWaker { schedule: Arc::downgrade(&self.schedule), task }));
        schedule.tasks.insert(task, Task { process, future: Some(future), waker, is_woken: false });
        schedule.wake(task);
    }

    /// Whether the process was killed.
    pub fn is_dead(&self, process: Process) -> bool {
        self.schedule.lock().processes.get(&process).is_some_and(|state| state.is_dead)
    }

    /// Whether it runs: it is neither dead nor stalled.
    pub fn is_running(&self, process: Process) -> bool {
        let schedule = self.schedule.lock();
        schedule.processes.get(&process).is_none_or(|state| !state.is_dead && state.held.is_none())
    }

    /// Stalls `process`: it runs no events until it resumes.
    pub fn stall(&self, process: Process) {
        if let Some(state) = self.schedule.lock().processes.get_mut(&process) {
            state.held.get_or_insert_default();
        }
    }

    /// Resumes the process: the events that it held run in order of arrival.
    pub fn resume(&self, process: Process) {
        let mut schedule = self.schedule.lock();
        let held = schedule.processes.get_mut(&process).and_then(|state| state.held.take());
        for item in held.into_iter().flatten() {
            schedule.numbers += 1;
            let key = (schedule.now, 0, schedule.numbers);
            schedule.items.insert(key, item);
        }
    }

    /// Kills a process: its tasks are dropped at their current await.
    pub fn kill(&self, process: Process) {
        let mut schedule = self.schedule.lock();
        let Some(state) = schedule.processes.get_mut(&process) else { return };
        state.is_dead = true;
        let held = state.held.take();
        let of_it: Vec<u64> =
            schedule.tasks.iter().filter(|(_, task)| task.process == process).map(|(id, _)| *id).collect();
        let mut tasks: Vec<(u64, Task)> =
            of_it.into_iter().filter_map(|id| Some((id, schedule.tasks.remove(&id)?))).collect();
        drop(schedule);
        // Dropping wakes other tasks and draws from the seed, so the order must not depend on that of a map.
        tasks.sort_by_key(|(id, _)| *id);
        drop((tasks, held));
    }

    /// Drops all tasks and all scheduled events. They hold references to the executor, which would keep it alive.
    pub fn end(&self) {
        let (tasks, items) = {
            let mut schedule = self.schedule.lock();
            (std::mem::take(&mut schedule.tasks), std::mem::take(&mut schedule.items))
        };
        drop((tasks, items));
    }

    /// Runs one event that is not after `end`; `false` if there is none.
    pub fn step(&self, end: Time) -> bool {
        let Some(next) = self.schedule.lock().next(end) else { return false };
        match next {
            Due::Happen(Item::Call(_, call)) => call(),
            Due::Happen(Item::Wake(waker)) => waker.wake(),
            Due::Happen(Item::Poll(task)) => self.poll(task),
            // Without the lock: dropping it may wake other tasks.
            Due::Drop(item) => drop(item),
        }
        true
    }

    fn poll(&self, id: u64) {
        let taken = {
            let mut schedule = self.schedule.lock();
            schedule.tasks.get_mut(&id).and_then(|task| {
                task.is_woken = false;
                Some((task.future.take()?, task.waker.clone()))
            })
        };
        let Some((mut future, waker)) = taken else { return };
        let ended = future.as_mut().poll(&mut Context::from_waker(&waker)).is_ready();
        let mut schedule = self.schedule.lock();
        if ended {
            schedule.tasks.remove(&id);
        } else if let Some(task) = schedule.tasks.get_mut(&id) {
            task.future = Some(future);
            return;
        }
        // Dropped without the lock: dropping it may wake other tasks. A task may have killed its own process.
        drop(schedule);
        drop(future);
    }
}

impl std::fmt::Debug for Executor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Executor at {} us", self.time())
    }
}

/// The executor as tasks of one process see it.
struct OfProcess {
    executor: Executor,
    process: Process,
}

impl std::fmt::Debug for OfProcess {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} of {:?}", self.process, self.executor)
    }
}

impl Clock for OfProcess {
    fn now(&self) -> Instant {
        self.executor.instant(self.executor.time())
    }
}

impl Runtime for OfProcess {
    fn sleep_until(&self, at: Instant) -> BoxFuture<'static, ()> {
        let at = self.executor.time_of(at);
        Box::pin(Sleep { executor: self.executor.clone(), at, posted: None })
    }

    fn spawn(&self, task: BoxFuture<'static, ()>) {
        self.executor.spawn_boxed(self.process, task);
    }

    fn random(&self) -> u64 {
        self.executor.draw(Random::any)
    }
}

/// Ready from an instant on.
struct Sleep {
    executor: Executor,
    at: Time,
    posted: Option<(Time, u32, u64)>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let executor = self.executor.clone();
        let mut schedule = executor.schedule.lock();
        if self.at <= schedule.now {
            return Poll::Ready(());
        }
        match self.posted.and_then(|key| schedule.items.get_mut(&key)) {
            Some(item) => *item = Item::Wake(cx.waker().clone()),
            None => self.posted = Some(schedule.post(self.at, Item::Wake(cx.waker().clone()))),
        }
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(key) = self.posted {
            let item = self.executor.schedule.lock().items.remove(&key);
            drop(item);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn executor(seed: u64) -> Executor {
        Executor::new(seed, Duration::from_micros(400))
    }

    /// The entries that tasks wrote, with their times.
    type Log = Arc<Mutex<Vec<(Time, &'static str)>>>;

    fn writes(executor: &Executor, process: Process, log: &Log, after: u64, what: &'static str) {
        let (runtime, log, handle) = (executor.runtime(process), log.clone(), executor.clone());
        let at = runtime.now() + Duration::from_millis(after);
        executor.spawn(process, async move {
            runtime.sleep_until(at).await;
            log.lock().push((handle.time(), what));
        });
    }

    fn run(executor: &Executor) {
        while executor.step(ms(1_000)) {}
    }

    #[test]
    fn time_passes_where_nothing_else_can_happen() {
        let (executor, log) = (executor(1), Log::default());
        writes(&executor, Process::WORLD, &log, 500, "late");
        writes(&executor, Process::WORLD, &log, 20, "soon");
        writes(&executor, Process::WORLD, &log, 1_001, "never");
        run(&executor);
        let log = log.lock();
        assert_eq!(log.iter().map(|(_, what)| *what).collect::<Vec<_>>(), ["soon", "late"]);
        assert!((ms(20)..ms(21)).contains(&log[0].0) && (ms(500)..ms(501)).contains(&log[1].0), "{log:?}");
    }

    #[test]
    fn a_process_that_stands_still_goes_on_later_and_a_dead_one_never() {
        let (executor, log) = (executor(2), Log::default());
        let (still, dead) = (executor.start(), executor.start());
        for process in [still, dead] {
            writes(&executor, process, &log, 10, "task");
            let (log, handle) = (log.clone(), executor.clone());
            executor.call(ms(10), process, move || log.lock().push((handle.time(), "call")));
        }
        executor.stall(still);
        executor.kill(dead);
        let handle = executor.clone();
        executor.call(ms(300), Process::WORLD, move || handle.resume(still));
        run(&executor);
        assert!(executor.is_dead(dead) && executor.is_running(still));
        let log = log.lock();
        assert!(log.len() == 2 && log.iter().all(|(at, _)| *at >= ms(300)), "{log:?}");
    }

    #[test]
    fn a_killed_task_drops_what_it_holds() {
        let executor = executor(3);
        let process = executor.start();
        let (held, waiting) = tokio_like_channel();
        executor.spawn(process, async move {
            let _held = held;
            std::future::pending::<()>().await;
        });
        while executor.step(ms(1)) {}
        assert_eq!(Arc::strong_count(&waiting), 2);
        executor.kill(process);
        assert_eq!(Arc::strong_count(&waiting), 1);
    }

    fn tokio_like_channel() -> (Arc<()>, Arc<()>) {
        let one = Arc::new(());
        (one.clone(), one)
    }

    #[test]
    fn the_end_drops_what_is_left() {
        let (executor, log) = (executor(4), Log::default());
        writes(&executor, Process::WORLD, &log, 500, "never");
        let kept = log.clone();
        executor.call(ms(600), Process::WORLD, move || kept.lock().clear());
        while executor.step(ms(1)) {}
        assert_eq!(Arc::strong_count(&log), 3);
        executor.end();
        assert_eq!(Arc::strong_count(&log), 1);
        assert!(!executor.step(ms(1_000)));
    }

    #[test]
    fn a_seed_gives_one_order_and_others_give_others() {
        let order = |seed| {
            let (executor, log) = (executor(seed), Log::default());
            for what in ["a", "b", "c", "d", "e"] {
                writes(&executor, Process::WORLD, &log, 7, what);
            }
            run(&executor);
            let log = log.lock();
            log.clone()
        };
        assert_eq!(order(5), order(5));
        assert!((0..20).any(|seed| order(seed) != order(5)));
    }
}

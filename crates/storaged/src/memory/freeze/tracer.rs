//! The tracer's part: send the thread, see helper and copy through, let the thread go, hold the copy.
//!
//! Everything it traces is let go of when its thread ends, so each failure here is just a return.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use sys::copy_code::{self, Layout, MOST_RANGES, NAME_BYTES};
use sys::trace::{self, Stop, Until};

use super::super::failure::about_process;
use super::super::maps;
use super::entry::{self, Entry};
use super::place::{self, Place};
use crate::error::{Code, Error};
use crate::memory::process::Process;

/// How often the thread looks at a shut gate: tens of milliseconds, so that a busy host does not matter.
const GATE_SPINS: u64 = 1 << 22;
/// How long an opened gate lets the thread pass: less than a tracer takes to die. About 10 microseconds.
const GATE_TICKS: u64 = 30_000;
/// After that long without a sign of the thread it is looked at.
const PATIENCE: Duration = Duration::from_millis(200);
/// The part of a thread's stack in which a pending return into the code would be.
const STACK_BYTES: u64 = 64 << 10;
/// Turns in which others get the processor before the tracer starts to sleep between looks.
const EAGER_LOOKS: u32 = 50;
const PAUSE: Duration = Duration::from_micros(50);
const PAUSE_SYSCALL: u64 = 34;
const FATAL: [i32; 6] = [4, 5, 7, 8, 11, 31]; // SIGILL, SIGTRAP, SIGBUS, SIGFPE, SIGSEGV, SIGSYS

/// Where a tracer can be. A test ends it at each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Seized,
    Stopped,
    Written,
    Sent,
    Resumed,
    FirstGate,
    HelperSeen,
    HelperResumed,
    CopySeen,
    HelperPast,
    CopyResumed,
    HelperGone,
    SecondGate,
    ThreadBack,
    ThreadFree,
    CopyHeld,
    Recorded,
    CopySent,
    CopyKept,
}

pub(super) struct Target<'a> {
    pub(super) process: &'a Process,
    pub(super) is_filtered: bool,
    pub(super) unforked: [(u64, u64); MOST_RANGES],
    pub(super) name: [u8; NAME_BYTES],
    pub(super) deadline: Instant,
    pub(super) reached: &'a (dyn Fn(Step) + Sync),
}

/// A copy that is stopped and ends when it is let go of.
pub(super) struct Held {
    copy: i32,
    keep: u64,
}

pub(super) enum Failure {
    /// The thread was at a bad place; a moment later it may not be.
    Again(&'static str),
    Failed(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl Failure {
    pub(super) fn into_error(self) -> Error {
        match self {
            Failure::Again(why) => Error::new(Code::Unavailable, format!("the process cannot be frozen now: {why}")),
            Failure::Failed(error) => error,
        }
    }
}

/// Makes the copy. The thread is free again when this returns, also after a failure that can be tried again.
pub(super) fn attempt(target: &Target<'_>) -> Result<Held, Failure> {
    let pid = target.process.pid();
    let memory = place::open_memory(target.process)?;
    let layout = copy_code::layout();
    let place = place::find(target.process, &memory, layout.length)?;
    seize(target)?;
    (target.reached)(Step::Seized);
    stop(target, pid)?;
    (target.reached)(Step::Stopped);
    let made = send(target, &memory, &place, &layout).and_then(|()| Run::new(target, &memory, &place, &layout).run());
    if let Err(Failure::Again(_)) = made {
        // It is stopped wherever this is said.
        trace::detach(pid, 0).map_err(|source| about_process(pid, source))?;
    }
    made
}

/// Sets the copy up to stay, if *keep* agrees, and returns what *keep* made.
pub(super) fn finish<T>(
    target: &Target<'_>,
    held: &Held,
    keep: impl FnOnce(Process) -> Result<T, Error>,
) -> Result<T, Error> {
    let &Held { copy, keep: keep_at } = held;
    let failed = |source| about_process(copy, source);
    let kept = keep(Process::open(copy)?)?;
    (target.reached)(Step::Recorded);
    trace::set_instruction(copy, keep_at).map_err(failed)?;
    resume(copy, Until::Syscall, 0)?;
    (target.reached)(Step::CopySent);
    // It sleeps in a system call when it is let go of: a filter, which applies again then, has no say in that.
    loop {
        match wait(target, copy)? {
            Stop::Syscall if trace::registers(copy).map_err(failed)?.0.orig_rax == PAUSE_SYSCALL => break,
            Stop::Exited(_) | Stop::Killed(_) => return Err(gone(copy)),
            _ => resume(copy, Until::Syscall, 0)?,
        }
    }
    resume(copy, Until::Event, 0)?;
    let mut looks = 0;
    while !sleeps(copy) {
        rest(&mut looks, target.deadline)?;
    }
    (target.reached)(Step::CopyKept);
    Ok(kept)
}

fn seize(target: &Target<'_>) -> Result<(), Error> {
    let pid = target.process.pid();
    let mut options = trace::OPTION_FORK | trace::OPTION_VFORK | trace::OPTION_CLONE | trace::OPTION_SYSCALL_GOOD;
    if target.is_filtered {
        options |= trace::OPTION_SUSPEND_SECCOMP;
    }
    trace::seize(pid, options).map_err(|source| {
        let mut failure = about_process(pid, source);
        match traced_by(pid) {
            Some(tracer) => {
                failure.code = Code::Conflict;
                failure.message = format!("process {pid} is traced by process {tracer}");
            }
            None if target.is_filtered => {
                failure.code = Code::Unsupported;
                failure.message = format!("the system call filter of process {pid} cannot be suspended");
            }
            None => {}
        }
        failure
    })
}

fn traced_by(pid: i32) -> Option<i32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:"))?.trim().parse().ok()?;
    (tracer != 0).then_some(tracer)
}

/// Stops a thread that runs.
fn stop(target: &Target<'_>, tid: i32) -> Result<(), Error> {
    let failed = |source| about_process(tid, source);
    trace::interrupt(tid).map_err(failed)?;
    loop {
        match wait(target, tid)? {
            Stop::Interrupted => return Ok(()),
            Stop::Group => return Err(Error::new(Code::Conflict, format!("process {tid} is stopped by a signal"))),
            Stop::Exited(_) | Stop::Killed(_) => return Err(gone(tid)),
            Stop::Signal(signal) => resume(tid, Until::Event, signal)?,
            Stop::Child | Stop::Syscall | Stop::Other(_) => resume(tid, Until::Event, 0)?,
        }
    }
}

/// Writes the code and points the stopped thread at it: after that it needs us no more.
fn send(target: &Target<'_>, memory: &File, place: &Place, layout: &Layout) -> Result<(), Failure> {
    let pid = target.process.pid();
    let failed = |source| Failure::Failed(about_process(pid, source));
    let registers = trace::registers(pid).map_err(failed)?;
    if place.was_used && (place.holds(registers.0.rip) || returns_to(target, place, registers.0.rsp)?) {
        return Err(Failure::Again("an earlier attempt is not over"));
    }
    let Some((Entry { offset, was_in_user_code }, constants)) = entry::plan(&registers, layout) else {
        return Err(Error::new(Code::Unsupported, format!("process {pid} does not run 64-bit code")).into());
    };
    if was_in_user_code && is_in_sequence(pid, memory) {
        return Err(Failure::Again("its thread is in a restartable sequence"));
    }
    let constants = copy_code::Constants {
        gated: target.is_filtered,
        spins: GATE_SPINS,
        name: target.name,
        ranges: target.unforked,
        ..constants
    };
    memory.write_all_at(&copy_code::assemble(&constants), place.start).map_err(|source| {
        let mut failure = about_process(pid, source);
        failure.code = Code::Unsupported;
        Failure::Failed(failure)
    })?;
    (target.reached)(Step::Written);
    trace::set_instruction(pid, place.start + offset).map_err(failed)?;
    (target.reached)(Step::Sent);
    Ok(())
}

/// Whether something on the stack may lead back into the code: the frame of a signal handler that interrupted it.
fn returns_to(target: &Target<'_>, place: &Place, stack_pointer: u64) -> Result<bool, Error> {
    let vmas = maps::parse(&target.process.read_proc("maps")?)?;
    let Some(stack) = vmas.iter().find(|vma| (vma.start..vma.end).contains(&stack_pointer)) else {
        return Ok(false);
    };
    let start = stack_pointer & !7;
    let end = (start + STACK_BYTES).min(stack.end);
    let mut words = vec![0; usize::try_from(end - start).unwrap_or(0)];
    target.process.read(&[(start, end)], &mut words)?;
    let mut words = words.chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_le_bytes));
    Ok(words.any(|word| place.holds(word)))
}

/// Whether the thread has begun a sequence that the kernel starts again when it is disturbed. Sent elsewhere it would not be.
fn is_in_sequence(pid: i32, memory: &File) -> bool {
    const SEQUENCE_OFFSET: u64 = 8;
    let address = trace::rseq_address(pid);
    let mut sequence = [0; 8];
    address != 0 && memory.read_exact_at(&mut sequence, address + SEQUENCE_OFFSET).is_ok() && sequence != [0; 8]
}

/// From the thread's start into the code to its return and a copy that is held.
struct Run<'a> {
    target: &'a Target<'a>,
    memory: &'a File,
    place: &'a Place,
    layout: &'a Layout,
    pid: i32,
    helper: Option<i32>,
    copy: Option<i32>,
    held: bool,
    copy_stops_at_hold: u32,
}

impl<'a> Run<'a> {
    fn new(target: &'a Target<'a>, memory: &'a File, place: &'a Place, layout: &'a Layout) -> Self {
        let pid = target.process.pid();
        Self { target, memory, place, layout, pid, helper: None, copy: None, held: false, copy_stops_at_hold: 0 }
    }

    fn run(mut self) -> Result<Held, Failure> {
        resume(self.pid, Until::Event, 0)?;
        self.reached(Step::Resumed);
        self.open(self.layout.first_gate)?;
        self.reached(Step::FirstGate);
        self.make_helper()?;
        self.see_helper_through()?;
        self.reached(Step::HelperGone);
        self.open(self.layout.second_gate)?;
        self.reached(Step::SecondGate);
        self.see_helper_reaped()?;
        self.see_thread_back()?;
        self.reached(Step::ThreadBack);
        trace::detach(self.pid, 0).map_err(|source| about_process(self.pid, source))?;
        self.reached(Step::ThreadFree);
        let Some(copy) = self.copy else {
            return Err(Error::new(Code::Bug, "a copy was made and not seen").into());
        };
        while !self.held {
            let stop = wait(self.target, copy)?;
            self.drive_copy(copy, stop)?;
        }
        self.reached(Step::CopyHeld);
        Ok(Held { copy, keep: self.place.start + self.layout.keep })
    }

    fn reached(&self, step: Step) {
        (self.target.reached)(step);
    }

    fn open(&self, gate: u64) -> Result<(), Error> {
        if !self.target.is_filtered {
            return Ok(()); // it is open for good
        }
        self.memory
            .write_all_at(&copy_code::opened_for(GATE_TICKS), self.place.start + gate)
            .map_err(|source| about_process(self.pid, source))
    }

    /// Until the thread has made the helper, or has come back without one.
    fn make_helper(&mut self) -> Result<(), Failure> {
        let mut since = Instant::now();
        let mut looks = 0;
        loop {
            match poll(self.pid)? {
                None if since.elapsed() < PATIENCE => {
                    self.open(self.layout.first_gate)?;
                    rest(&mut looks, self.target.deadline)?;
                }
                None => {
                    // A signal may have made it come back without a look at the code, or a gate opened too late.
                    trace::interrupt(self.pid).map_err(|source| about_process(self.pid, source))?;
                    since = Instant::now();
                }
                Some(Stop::Child) => break,
                Some(Stop::Interrupted) => {
                    let registers = trace::registers(self.pid).map_err(|source| about_process(self.pid, source))?;
                    if !self.place.holds(registers.0.rip) && !returns_to(self.target, self.place, registers.0.rsp)? {
                        return Err(Failure::Again("its thread came back too early"));
                    }
                    resume(self.pid, Until::Event, 0)?;
                }
                Some(stop) => self.pass(stop)?,
            }
        }
        self.helper = Some(trace::event_child(self.pid).map_err(|source| about_process(self.pid, source))?);
        self.reached(Step::HelperSeen);
        resume(self.pid, Until::Event, 0)?;
        Ok(())
    }

    /// Until the helper has ended, the copy made.
    fn see_helper_through(&mut self) -> Result<(), Failure> {
        let Some(helper) = self.helper else { return Ok(()) };
        let mut looks = 0;
        loop {
            if let Some(stop) = poll(self.pid)? {
                self.pass(stop)?;
            }
            if let Some(copy) = self.copy.filter(|_| !self.held) {
                if let Some(stop) = poll(copy)? {
                    self.drive_copy(copy, stop)?;
                }
            }
            match poll(helper)? {
                None => {
                    rest(&mut looks, self.target.deadline)?;
                    continue;
                }
                Some(Stop::Exited(0)) if self.copy.is_some() => return Ok(()),
                Some(Stop::Exited(number)) => {
                    return Err(about_process(self.pid, std::io::Error::from_raw_os_error(number)).into());
                }
                Some(Stop::Killed(_)) => return Err(gone(helper).into()),
                Some(Stop::Child) => {
                    self.copy = Some(trace::event_child(helper).map_err(|source| about_process(helper, source))?);
                    self.reached(Step::CopySeen);
                    resume(helper, Until::Event, 0)?;
                    self.reached(Step::HelperPast);
                }
                Some(Stop::Signal(signal)) if FATAL.contains(&signal) => resume(helper, Until::Event, signal)?,
                Some(_) => {
                    resume(helper, Until::Event, 0)?;
                    self.reached(Step::HelperResumed);
                }
            }
            looks = 0;
        }
    }

    /// Until the thread has reaped the helper, or has had the time to.
    fn see_helper_reaped(&mut self) -> Result<(), Failure> {
        let Some(helper) = self.helper else { return Ok(()) };
        let zombie = Path::new("/proc").join(helper.to_string());
        let since = Instant::now();
        let mut looks = 0;
        while zombie.exists() && since.elapsed() < PATIENCE {
            if let Some(stop) = poll(self.pid)? {
                self.pass(stop)?;
            }
            self.open(self.layout.second_gate)?;
            rest(&mut looks, self.target.deadline)?;
        }
        Ok(())
    }

    /// Until the thread is in its own code, and stopped there.
    fn see_thread_back(&mut self) -> Result<(), Failure> {
        loop {
            stop(self.target, self.pid)?;
            let registers = trace::registers(self.pid).map_err(|source| about_process(self.pid, source))?;
            if !self.place.holds(registers.0.rip) {
                return Ok(());
            }
            resume(self.pid, Until::Event, 0)?;
            let mut looks = EAGER_LOOKS;
            rest(&mut looks, self.target.deadline)?;
        }
    }

    /// Lets the thread go on after a stop that is none of our business.
    fn pass(&self, stop: Stop) -> Result<(), Error> {
        match stop {
            Stop::Exited(_) | Stop::Killed(_) => Err(gone(self.pid)),
            Stop::Group => Err(Error::new(Code::Conflict, format!("process {} is stopped by a signal", self.pid))),
            Stop::Signal(signal) => resume(self.pid, Until::Event, signal),
            Stop::Child | Stop::Interrupted | Stop::Syscall | Stop::Other(_) => resume(self.pid, Until::Event, 0),
        }
    }

    /// Takes the copy from system call to system call, up to the end of the one before `hold`.
    fn drive_copy(&mut self, copy: i32, stop: Stop) -> Result<(), Error> {
        match stop {
            Stop::Exited(_) | Stop::Killed(_) => return Err(gone(copy)),
            Stop::Syscall => {
                let registers = trace::registers(copy).map_err(|source| about_process(copy, source))?;
                if registers.0.rip == self.place.start + self.layout.hold {
                    self.copy_stops_at_hold += 1; // on the way in, and on the way out
                    if self.copy_stops_at_hold == 2 {
                        if registers.0.rax != 0 {
                            return Err(Error::new(
                                Code::Unsupported,
                                "this kernel cannot close all descriptors (Linux 5.9)",
                            ));
                        }
                        self.held = true;
                        return Ok(());
                    }
                }
            }
            Stop::Signal(signal) if FATAL.contains(&signal) => return resume(copy, Until::Syscall, signal),
            Stop::Interrupted | Stop::Group | Stop::Child | Stop::Other(_) | Stop::Signal(_) => {}
        }
        resume(copy, Until::Syscall, 0)?;
        self.reached(Step::CopyResumed);
        Ok(())
    }
}

fn resume(tid: i32, until: Until, signal: i32) -> Result<(), Error> {
    trace::resume(tid, until, signal).map_err(|source| about_process(tid, source))
}

fn poll(tid: i32) -> Result<Option<Stop>, Error> {
    trace::wait_nowait(tid).map_err(|source| about_process(tid, source))
}

/// What *tid* does next.
fn wait(target: &Target<'_>, tid: i32) -> Result<Stop, Error> {
    let mut looks = 0;
    loop {
        if let Some(stop) = poll(tid)? {
            return Ok(stop);
        }
        rest(&mut looks, target.deadline)?;
    }
}

/// Lets others run between two looks. The kernel has no wait for a traced thread that ends after a while.
fn rest(looks: &mut u32, deadline: Instant) -> Result<(), Error> {
    if Instant::now() > deadline {
        return Err(Error::new(Code::Unavailable, "the process could not be frozen in time"));
    }
    if *looks < EAGER_LOOKS {
        *looks += 1;
        thread::yield_now();
    } else {
        thread::sleep(PAUSE);
    }
    Ok(())
}

fn sleeps(pid: i32) -> bool {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).unwrap_or_default();
    let after_name = stat.iter().rposition(|&byte| byte == b')').and_then(|at| stat.get(at + 2));
    after_name == Some(&b'S')
}

fn gone(pid: i32) -> Error {
    Error::new(Code::Unavailable, format!("process {pid} has ended"))
}

//! Freezing a process that notices whatever it does to it.

#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used, reason = "a test ends at what it did not expect, helpers included")]

mod victim;

use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use storaged::error::Code;
use storaged::memory::capture::{Extent, LayerSink, capture, dirty_bytes};
use storaged::memory::freeze::{self, Frozen, Limits, Request, Step};
use storaged::memory::process::Process;
use storaged::memory::source::Holder;
use victim::{DIRTY_MIB, SIZE_MIB, Victim};

const PAGE: usize = 4096;
const LIMITS: Limits = Limits { most_anonymous_bytes: 4 << 30, timeout: Duration::from_secs(20) };
const TIMEOUT: Duration = Duration::from_secs(20);
const STEPS: [Step; 19] = [
    Step::Seized,
    Step::Stopped,
    Step::Written,
    Step::Sent,
    Step::Resumed,
    Step::FirstGate,
    Step::HelperSeen,
    Step::HelperResumed,
    Step::CopySeen,
    Step::HelperPast,
    Step::CopyResumed,
    Step::HelperGone,
    Step::SecondGate,
    Step::ThreadBack,
    Step::ThreadFree,
    Step::CopyHeld,
    Step::Recorded,
    Step::CopySent,
    Step::CopyKept,
];

fn name() -> String {
    format!("frz-{}", std::process::id())
}

fn freeze(victim: &Victim) -> Frozen {
    freeze_named(victim, &name()).unwrap()
}

fn freeze_named(victim: &Victim, name: &str) -> Result<Frozen, storaged::error::Error> {
    freeze::freeze(&Request { pid: victim.pid(), image: &victim.image, name, limits: LIMITS }, |_| Ok(()))
}

/// Memory put together again: `None` for pages that did not change.
#[derive(Default)]
struct Flat(Vec<Option<Vec<u8>>>);

impl LayerSink for Flat {
    fn reserve(&mut self, _: u64) -> std::io::Result<()> {
        self.0 = vec![None; usize::try_from(SIZE_MIB << 20).unwrap() / PAGE];
        Ok(())
    }

    fn append(&mut self, extents: &[Extent], mut data: &[u8]) -> std::io::Result<()> {
        for extent in extents {
            let first = usize::try_from(extent.offset).unwrap() / PAGE;
            for page in first..first + usize::try_from(extent.length).unwrap() / PAGE {
                assert!(self.0[page..].iter().all(Option::is_none), "pages come in order");
                self.0[page] = Some(if extent.zero { vec![0; PAGE] } else { data[..PAGE].to_vec() });
                data = if extent.zero { data } else { &data[PAGE..] };
            }
        }
        assert!(data.is_empty());
        Ok(())
    }
}

fn captured(process: &Process, victim: &Victim) -> Vec<Option<Vec<u8>>> {
    let mut flat = Flat::default();
    capture(process, &victim.image, &mut flat, &AtomicBool::new(false)).unwrap();
    flat.0
}

/// What `victim.c` writes; page 0 is the one in which its threads count.
fn wanted(page: usize, hole: bool) -> Option<Vec<u8>> {
    if hole && (16..32).contains(&page) {
        return Some(vec![0; PAGE]);
    }
    if page >= usize::try_from(DIRTY_MIB << 20).unwrap() / PAGE {
        return None;
    }
    let word = if page % 8 == 0 { 0 } else { (page as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) };
    let mut bytes = vec![0; PAGE];
    bytes[..8].copy_from_slice(&word.to_le_bytes());
    bytes[PAGE - 8..].copy_from_slice(&word.to_le_bytes());
    Some(bytes)
}

fn check_pages(pages: &[Option<Vec<u8>>], hole: bool) {
    for (number, page) in pages.iter().enumerate().skip(1) {
        assert!(*page == wanted(number, hole), "page {number}");
    }
}

#[test]
fn a_copy_stands_still_while_the_process_runs_on() {
    let Some(victim) = Victim::start("read", &["dontfork"]) else { return };

    let frozen = freeze(&victim);

    let first = captured(frozen.process(), &victim);
    check_pages(&first, false);
    let word = |page: &Option<Vec<u8>>| u64::from_le_bytes(page.as_ref().unwrap()[8..16].try_into().unwrap());
    let runner = Process::open(victim.pid()).unwrap();
    let mut now = vec![0; PAGE];
    wait_until(|| {
        runner.read(&[(victim.address, victim.address + PAGE as u64)], &mut now).unwrap();
        word(&Some(now.clone())) > word(&first[0])
    });
    assert!(captured(frozen.process(), &victim) == first);
    assert!(victim.is_unforked());
    assert_eq!(frozen.dirty_bytes().unwrap(), DIRTY_MIB << 20);
    assert!(frozen.private_copies_bytes().unwrap() > 0);
    frozen.thaw(TIMEOUT).unwrap();
    victim.finish();
}

fn wait_until(mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !condition() {
        assert!(Instant::now() < deadline, "it never came");
        std::thread::yield_now();
    }
}

/// Nothing of a freeze is left: neither on the victim nor beside it.
fn assert_unharmed(victim: &Victim, name: &str) {
    wait_until(|| freeze::find_named(name).unwrap().is_empty());
    // Under a filter the helper dies with the tracer that suspended it, and nobody may reap it.
    let may_be_reaped = victim.status("Seccomp") == "0";
    wait_until(|| (victim.is_child_free() || !may_be_reaped) && victim.status("TracerPid") == "0");
    let state = victim.status("State");
    assert!(!state.starts_with(['T', 't', 'Z']), "{state}");
}

fn many_times(what: &str, options: &[&str], times: usize) {
    let Some(victim) = Victim::start(what, options) else { return };
    let mut made = 0;
    for _ in 0..times {
        // A signal that comes in between is a reason to try again later, and harms nothing.
        match freeze_named(&victim, &format!("{}{}", name(), made % 10)) {
            Ok(frozen) => {
                assert_eq!(std::fs::read_dir(format!("/proc/{}/fd", frozen.identity().pid)).unwrap().count(), 0);
                frozen.thaw(TIMEOUT).unwrap();
                made += 1;
            }
            Err(failure) => {
                eprintln!("{what} {options:?}: {failure}");
                assert_eq!(failure.code, Code::Unavailable);
            }
        }
        assert_eq!(victim.status("TracerPid"), "0");
    }
    assert!(made > times / 2, "{made} of {times}");
    // Under a filter, the helper is reaped only if the host lets the thread at its gate in time.
    assert!(victim.is_child_free() || options.contains(&"filter"));
    victim.finish();
}

#[test]
fn a_thread_in_any_kind_of_system_call_goes_on_with_it() {
    for what in ["read", "futex", "poll", "nanosleep", "uring"] {
        many_times(what, &["dontfork"], 100);
    }
}

#[test]
fn a_thread_that_computes_keeps_every_register_and_flag() {
    many_times("user", &["dontfork"], 200);
}

#[test]
fn a_filter_of_system_calls_is_suspended_and_in_force_again() {
    many_times("read", &["dontfork", "filter"], 100);
    many_times("user", &["dontfork", "filter"], 50);
    many_times("nanosleep", &["filter", "static"], 50);
}

#[test]
fn a_static_program_is_frozen_too() {
    many_times("poll", &["static"], 50);
}

#[test]
fn signals_are_delivered_meanwhile() {
    for what in ["poll", "nanosleep", "futex", "user"] {
        many_times(what, &["storm"], 100);
    }
}

/// The tracer as a process of its own, which ends at the step that the environment names. Not a test.
#[test]
#[ignore = "run by the tests that kill it"]
fn tracer_that_is_killed() {
    let Ok(job) = std::env::var("FREEZE_JOB") else { return };
    let mut words = job.split(' ');
    let mut next = || words.next().unwrap().to_owned();
    let (pid, path, size, name) = (next(), next(), next(), next());
    let (step, occurrence) = (next(), next().parse::<usize>().unwrap());
    let image = storaged::memory::maps::Image {
        backing: storaged::memory::maps::Backing::Path(path.into()),
        size_bytes: size.parse().unwrap(),
    };
    let request = Request { pid: pid.parse().unwrap(), image: &image, name: &name, limits: LIMITS };
    let seen = std::sync::atomic::AtomicUsize::new(0);
    let reached = |at: Step| {
        if format!("{at:?}") == step && seen.fetch_add(1, std::sync::atomic::Ordering::SeqCst) == occurrence {
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
            loop {
                std::thread::park();
            }
        }
    };
    println!("started");
    let made = freeze::freeze_observed(&request, |_| Ok(()), &reached);
    println!("{:?}", made.map(|frozen| frozen.identity()));
}

fn tracer(victim: &Victim, name: &str, step: &str, occurrence: usize) -> Command {
    let storaged::memory::maps::Backing::Path(path) = &victim.image.backing else { unreachable!() };
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "tracer_that_is_killed", "--ignored", "--nocapture"]).env(
        "FREEZE_JOB",
        format!("{} {} {} {name} {step} {occurrence}", victim.pid(), path.display(), victim.image.size_bytes),
    );
    command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
    command
}

fn killed_at_every_step(what: &str, options: &[&str]) {
    let Some(victim) = Victim::start(what, options) else { return };
    let name = format!("kil-{}{}", std::process::id(), options.len());
    for step in STEPS {
        for occurrence in 0..2 {
            let status = tracer(&victim, &name, &format!("{step:?}"), occurrence).status().unwrap();
            assert!(!status.success() || occurrence > 0, "{step:?} was not reached: {status}");
            // From the record on, the copy is there to stay: whoever has the record ends it.
            for identity in freeze::find_named(&name).unwrap() {
                freeze::end_recorded(identity, TIMEOUT).unwrap();
            }
            eprintln!("killed at {step:?}, {occurrence}");
            assert_unharmed(&victim, &name);
            assert_eq!(victim.is_unforked(), options.contains(&"dontfork"), "{step:?}");
        }
    }
    freeze(&victim).thaw(TIMEOUT).unwrap();
    victim.finish();
}

#[test]
fn a_tracer_killed_at_any_step_harms_nothing() {
    killed_at_every_step("read", &["dontfork"]);
    killed_at_every_step("user", &[]);
    killed_at_every_step("nanosleep", &["storm", "static", "dontfork"]);
}

#[test]
fn a_tracer_killed_at_any_step_harms_nothing_under_a_filter() {
    killed_at_every_step("read", &["filter"]);
    killed_at_every_step("user", &["filter", "static"]);
}

#[test]
fn a_tracer_killed_at_any_instant_harms_nothing() {
    let Some(victim) = Victim::start("poll", &["dontfork"]) else { return };
    let name = format!("rnd-{}", std::process::id());
    let mut random = 0x5eed_u64;
    for _ in 0..100 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mut child = tracer(&victim, &name, "never", 0).spawn().unwrap();
        std::thread::sleep(Duration::from_micros(random >> 50)); // the instant is what is tested; any is good
        child.kill().unwrap();
        child.wait().unwrap();
        wait_until(|| victim.status("TracerPid") == "0");
        for identity in freeze::find_named(&name).unwrap() {
            freeze::end_recorded(identity, TIMEOUT).unwrap();
        }
        assert_unharmed(&victim, &name);
    }
    assert!(victim.is_unforked());
    victim.finish();
}

#[test]
fn a_process_that_is_killed_meanwhile_leaves_no_copy() {
    for step in STEPS {
        let Some(mut victim) = Victim::start("read", &["dontfork"]) else { return };
        let name = format!("die-{}", std::process::id());
        let request = Request { pid: victim.pid(), image: &victim.image.clone(), name: &name, limits: LIMITS };
        let pid = rustix::process::Pid::from_raw(victim.pid()).unwrap();
        let kill = |at: Step| {
            if at == step {
                rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
            }
        };

        match freeze::freeze_observed(&request, |_| Ok(()), &kill) {
            Ok(frozen) => frozen.thaw(TIMEOUT).unwrap(), // it was too late to matter
            Err(failure) => assert_eq!(failure.code, Code::Unavailable, "{step:?}: {failure}"),
        }

        victim.kill();
        wait_until(|| freeze::find_named(&name).unwrap().is_empty());
    }
}

#[test]
fn what_cannot_be_frozen_is_left_as_it_was() {
    let Some(victim) = Victim::start("poll", &[]) else { return };
    let small = Limits { most_anonymous_bytes: 1 << 20, ..LIMITS };
    let name = format!("not-{}", std::process::id());
    let request = Request { pid: victim.pid(), image: &victim.image, name: &name, limits: small };
    let refused = freeze::freeze(&request, |_| Ok(())).err().map(|failure| failure.code);
    assert_eq!(refused, Some(Code::Exhausted));

    let unrecorded = freeze::freeze(&Request { limits: LIMITS, ..request }, |_| {
        Err(storaged::error::Error {
            code: Code::Exhausted,
            left: storaged::error::Left::RolledBack,
            message: "no room for the record".into(),
            source: None,
        })
    });
    assert_eq!(unrecorded.err().map(|failure| failure.code), Some(Code::Exhausted));

    for bad in ["", "sixteen-letters!", "a b", "ä"] {
        let refused = freeze_named(&victim, bad).err().map(|failure| failure.code);
        assert_eq!(refused, Some(Code::Invalid), "{bad}");
    }

    let pid = rustix::process::Pid::from_raw(victim.pid()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    wait_until(|| victim.status("State").starts_with('T'));
    assert_eq!(freeze_named(&victim, &name).err().map(|failure| failure.code), Some(Code::Conflict));
    wait_until(|| victim.status("State").starts_with('T') && victim.status("TracerPid") == "0"); // as somebody wanted it
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();

    assert_unharmed(&victim, &name);
    victim.finish();
}

#[test]
fn a_copy_is_found_again_and_told_from_others() {
    let Some(victim) = Victim::start("poll", &["hole"]) else { return };
    let name = format!("adp-{}", std::process::id());
    let identity = freeze_named(&victim, &name).unwrap().identity(); // and forgotten

    assert_eq!(freeze::find_named(&name).unwrap(), [identity]);
    let adopted = Frozen::adopt(identity, &victim.image).unwrap();
    check_pages(&captured(adopted.process(), &victim), true);
    let mut other = identity;
    other.start_time += 1;
    assert!(Frozen::adopt(other, &victim.image).is_err());
    freeze::end_recorded(other, TIMEOUT).unwrap();
    assert_eq!(freeze::find_named(&name).unwrap(), [identity]);

    adopted.thaw(TIMEOUT).unwrap();
    wait_until(|| freeze::find_named(&name).unwrap().is_empty());
    victim.finish();
}

#[test]
fn a_copy_is_the_source_of_what_it_changed() {
    let Some(victim) = Victim::start("poll", &["hole"]) else { return };
    let frozen = freeze(&victim);
    let dirty = usize::try_from(DIRTY_MIB << 20).unwrap();
    let mut buffer = vec![7; dirty + 8 * PAGE];

    let parts = frozen.read(&mut buffer, 0).unwrap();

    let held: Vec<_> = parts.iter().map(|part| (part.offset, part.length, part.holder)).collect();
    let page = PAGE as u64;
    let dirty_bytes = DIRTY_MIB << 20;
    assert_eq!(
        held,
        [
            (0, 16 * page, Holder::Child),
            (16 * page, 16 * page, Holder::Zeros),
            (32 * page, dirty_bytes - 32 * page, Holder::Child),
            (dirty_bytes, 8 * page, Holder::Stack),
        ]
    );
    for number in 1..dirty / PAGE {
        assert!(buffer[number * PAGE..(number + 1) * PAGE] == wanted(number, true).unwrap(), "page {number}");
    }
    assert!(buffer[dirty..].iter().all(|&byte| byte == 7));
    assert!(frozen.read(&mut buffer[..PAGE], 1).is_err());
    assert!(frozen.read(&mut buffer[..PAGE], SIZE_MIB << 20).is_err());
    assert!(frozen.read(&mut buffer[..PAGE], u64::MAX - 4095).is_err());

    freeze::end_recorded(frozen.identity(), TIMEOUT).unwrap();
    assert!(frozen.read(&mut buffer[..PAGE], 0).is_err(), "gone is an error, not zeros");
    victim.finish();
}

#[test]
fn a_running_process_is_counted_as_its_copy() {
    let Some(victim) = Victim::start("poll", &[]) else { return };
    let process = Process::open(victim.pid()).unwrap();
    assert_eq!(dirty_bytes(&process, &victim.image).unwrap(), DIRTY_MIB << 20);
    victim.finish();
}

//! Keeps the daemon running, reaps what nobody else does, and ends the machine.
//!
//! It holds what the daemon must not lose (the memory file with its settings) and is too
//! simple to fail: no allocation to speak of, no network, no file of the image. The daemon
//! is started from our own executable, which needs no path in the image.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions, getpid, setpriority_process, wait, waitpid};
use rustix::system::{RebootCommand, reboot};
use sys::signals::Blocked;

use crate::arguments::Inherited;
use crate::boot::enter_group;
use crate::say;
use crate::store::Store;

const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// A daemon that ran for this long was not failing.
const GOOD_RUN: Duration = Duration::from_secs(10);

/// Signals that are waited for. Those that only mean something by default do nothing here.
const SIGNALS: [Signal; 9] = [
    Signal::CHILD,
    Signal::TERM,
    Signal::INT,
    Signal::POWER,
    Signal::HUP,
    Signal::QUIT,
    Signal::USR1,
    Signal::USR2,
    Signal::ALARM,
];

/// How the machine is switched off; some machine monitors only notice a reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PowerOff {
    PowerOff,
    Reboot,
}

/// Whether this is the first process, to which all orphans come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    FirstProcess,
    BesideInit,
}

/// Supervises for ever.
///
/// # Errors
/// Only when signals cannot be waited for.
pub(crate) fn run(inherited: Inherited, place: Place, power_off: PowerOff) -> io::Result<()> {
    let numbers = SIGNALS.map(Signal::as_raw);
    let signals = Blocked::new(&numbers)?;
    let mut daemon =
        Daemon { inherited, child: None, started: Instant::now(), pause: FIRST_PAUSE, due: Some(Instant::now()) };
    loop {
        let signal = signals.wait(daemon.start_if_due());
        reap(&mut daemon, place);
        if signal
            .is_some_and(|s| s == Signal::TERM.as_raw() || s == Signal::POWER.as_raw() || s == Signal::USR2.as_raw())
        {
            end_machine(power_off);
        }
        if signal == Some(Signal::INT.as_raw()) {
            end_machine(PowerOff::Reboot);
        }
    }
}

/// As a process of its own beside the image's init.
///
/// # Errors
/// As for [`run`].
pub(crate) fn run_inherited(inherited: Inherited) -> io::Result<()> {
    let power_off = match std::env::var("AENV_OFF").as_deref() {
        Ok("reboot") => PowerOff::Reboot,
        _ => PowerOff::PowerOff,
    };
    run(inherited, Place::BesideInit, power_off)
}

/// Starts a supervisor as a process of its own, and makes this one the image's own init.
///
/// # Errors
/// Only when there can be no supervisor.
pub(crate) fn beside(
    init: &str,
    inherited: Inherited,
    store: Store,
    cgroup: Option<OwnedFd>,
    power_off: PowerOff,
) -> io::Result<()> {
    let off = if power_off == PowerOff::Reboot { "reboot" } else { "poweroff" };
    let supervisor = ourselves().args(inherited.arguments("supervise")).env("AENV_OFF", off).spawn()?;
    if let Some(root) = &cgroup
        && let Err(error) = enter_group(root, "workload")
    {
        say!("the init of the image is not limited: {error}");
    }
    // The supervisor has them; the image must not.
    drop((store, cgroup));
    let _ = std::fs::write("/proc/self/oom_score_adj", "0");
    let _ = setpriority_process(Some(getpid()), 0);
    let environment =
        [("HOME", "/"), ("TERM", "linux"), ("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")];
    let error = Command::new(init).env_clear().envs(environment).exec();
    say!("{init} cannot be run: {error}");
    drop(supervisor);
    // The sandbox is still of use: somebody has to reap.
    loop {
        if wait(WaitOptions::empty()).is_err() {
            std::thread::sleep(LONGEST_PAUSE);
        }
    }
}

/// Our own executable, which is still there when its name is not.
fn ourselves() -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("envd");
    command
}

struct Daemon {
    inherited: Inherited,
    child: Option<Child>,
    started: Instant,
    pause: Duration,
    /// When it is started (again); `None` while it runs.
    due: Option<Instant>,
}

impl Daemon {
    /// Starts it when it is time to; gives how long to wait until then.
    fn start_if_due(&mut self) -> Option<Duration> {
        let left = self.due?.saturating_duration_since(Instant::now());
        if !left.is_zero() {
            return Some(left);
        }
        match ourselves().args(self.inherited.arguments("daemon")).spawn() {
            Ok(child) => {
                self.child = Some(child);
                self.started = Instant::now();
                self.inherited.restarts += 1;
                self.due = None;
                None
            }
            Err(error) => {
                say!("the daemon cannot be started: {error}");
                self.schedule();
                Some(self.pause)
            }
        }
    }

    fn has_died(&mut self, how: &str) {
        say!("the daemon ended ({how}); starting it again");
        self.child = None;
        if self.started.elapsed() >= GOOD_RUN {
            self.pause = FIRST_PAUSE;
        }
        self.schedule();
    }

    fn schedule(&mut self) {
        self.due = Some(Instant::now() + self.pause);
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
    }

    fn pid(&self) -> Option<Pid> {
        self.child.as_ref().and_then(|child| i32::try_from(child.id()).ok()).and_then(Pid::from_raw)
    }
}

/// Takes in everything that has ended.
fn reap(daemon: &mut Daemon, place: Place) {
    loop {
        let ended = match place {
            Place::FirstProcess => wait(WaitOptions::NOHANG),
            Place::BesideInit => match daemon.pid() {
                Some(pid) => waitpid(Some(pid), WaitOptions::NOHANG),
                None => return,
            },
        };
        match ended {
            Ok(Some((pid, status))) if Some(pid) == daemon.pid() => {
                let how = match (status.exit_status(), status.terminating_signal()) {
                    (Some(code), _) => format!("exit status {code}"),
                    (_, Some(signal)) => format!("signal {signal}"),
                    _ => "unknown".to_owned(),
                };
                daemon.has_died(&how);
            }
            Ok(Some(_)) => {}
            Ok(None) | Err(_) => return,
        }
    }
}

fn end_machine(how: PowerOff) {
    rustix::fs::sync();
    let command = match how {
        PowerOff::PowerOff => RebootCommand::PowerOff,
        PowerOff::Reboot => RebootCommand::Restart,
    };
    if let Err(error) = reboot(command) {
        say!("the machine cannot be switched off: {error}");
    }
}

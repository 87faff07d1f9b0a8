//! The words for how a process ended.

use rustix::process::WaitIdStatus;
use wire::process::Ended;

/// Describes an exit status; *`out_of_memory`* when the OOM killer was at work meanwhile.
pub(super) fn describe(status: &WaitIdStatus, out_of_memory: bool) -> Ended {
    if let Some(code) = status.exit_status() {
        return exited(code, out_of_memory);
    }
    let signal = status.terminating_signal().unwrap_or(0);
    signalled(signal, status.dumped(), out_of_memory)
}

fn exited(code: i32, out_of_memory: bool) -> Ended {
    let status = format!("exit status {code}");
    let error = match code {
        0 => None,
        // A shell whose command was killed passes that on as 128 + SIGKILL.
        137 if out_of_memory => Some(format!("{status} (out of memory)")),
        _ => Some(status.clone()),
    };
    Ended { exit_code: code, exited: true, status, error }
}

fn signalled(signal: i32, dumped: bool, out_of_memory: bool) -> Ended {
    let mut status = format!("signal: {}", signal_text(signal));
    if dumped {
        status.push_str(" (core dumped)");
    }
    let error = if signal == 9 && out_of_memory { format!("{status} (out of memory)") } else { status.clone() };
    Ended { exit_code: -1, exited: false, status, error: Some(error) }
}

fn signal_text(signal: i32) -> String {
    let text = match signal {
        1 => "hangup",
        2 => "interrupt",
        3 => "quit",
        4 => "illegal instruction",
        5 => "trace/breakpoint trap",
        6 => "aborted",
        7 => "bus error",
        8 => "floating point exception",
        9 => "killed",
        10 => "user defined signal 1",
        11 => "segmentation fault",
        12 => "user defined signal 2",
        13 => "broken pipe",
        14 => "alarm clock",
        15 => "terminated",
        other => return format!("signal {other}"),
    };
    text.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn success_has_no_error() {
        let ended = exited(0, true);
        assert_eq!((ended.status.as_str(), ended.error), ("exit status 0", None));
    }

    #[test]
    fn the_oom_killer_shows_in_the_error_and_not_in_the_status() {
        let killed = signalled(9, false, true);
        assert_eq!((killed.exit_code, killed.exited, killed.status.as_str()), (-1, false, "signal: killed"));
        assert_eq!(killed.error.as_deref(), Some("signal: killed (out of memory)"));
        assert_eq!(signalled(9, false, false).error.as_deref(), Some("signal: killed"));
        assert_eq!(signalled(15, false, true).error.as_deref(), Some("signal: terminated"));
        assert_eq!(exited(137, true).error.as_deref(), Some("exit status 137 (out of memory)"));
    }
}

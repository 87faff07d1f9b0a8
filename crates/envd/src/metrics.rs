//! How busy the sandbox is.

use std::path::Path;

use hyper::StatusCode;
use serde::Serialize;
use wire::json;

use crate::answer::{self, Answer};
use crate::app::App;
use crate::etc;

/// CPU time since boot, in ticks of all processors together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct CpuSample {
    busy: u64,
    total: u64,
}

#[derive(Serialize)]
struct Metrics {
    /// Unix seconds.
    ts: u64,
    cpu_count: usize,
    /// Of all processors together, since the last time it was asked for.
    cpu_used_pct: f64,
    mem_total: u64,
    mem_used: u64,
    mem_cache: u64,
    mem_total_mib: u64,
    mem_used_mib: u64,
    disk_total: u64,
    disk_used: u64,
}

pub(crate) fn answer(app: &App) -> Answer {
    let text = |path| etc::read(Path::new(path)).ok().flatten().unwrap_or_default();
    let sample = cpu(&text("/proc/stat"));
    let used_pct = used_pct(app.cpu.replace(sample), sample);
    let memory = memory(&text("/proc/meminfo"));
    let (disk_total, disk_used) = disk();
    let ts = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |t| t.as_secs());
    let metrics = Metrics {
        ts,
        cpu_count: std::thread::available_parallelism().map_or(1, Into::into),
        cpu_used_pct: used_pct,
        mem_total: memory.total,
        mem_used: memory.used,
        mem_cache: memory.cache,
        mem_total_mib: memory.total >> 20,
        mem_used_mib: memory.used >> 20,
        disk_total,
        disk_used,
    };
    answer::json(StatusCode::OK, json::write(&metrics))
}

fn cpu(stat: &str) -> CpuSample {
    let line = stat.lines().next().unwrap_or("");
    // user nice system idle iowait irq softirq steal; guest time is part of user time.
    let ticks: Vec<u64> = line.split_whitespace().skip(1).take(8).filter_map(|n| n.parse().ok()).collect();
    let total = ticks.iter().sum();
    let idle = ticks.get(3).unwrap_or(&0) + ticks.get(4).unwrap_or(&0);
    CpuSample { busy: total - idle, total }
}

fn used_pct(before: CpuSample, now: CpuSample) -> f64 {
    let total = now.total.saturating_sub(before.total);
    let busy = now.busy.saturating_sub(before.busy);
    if total == 0 {
        return 0.0;
    }
    #[expect(clippy::cast_precision_loss, reason = "a percentage with two decimals needs no more")]
    let share = busy as f64 / total as f64;
    (share * 10_000.0).round() / 100.0
}

#[derive(Debug, PartialEq, Eq)]
struct Memory {
    total: u64,
    used: u64,
    cache: u64,
}

fn memory(meminfo: &str) -> Memory {
    let bytes = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) * 1024
    };
    let total = bytes("MemTotal");
    let cache = bytes("Cached") + bytes("SReclaimable") + bytes("Buffers");
    Memory { total, used: total.saturating_sub(bytes("MemAvailable")), cache }
}

fn disk() -> (u64, u64) {
    rustix::fs::statvfs("/").map_or((0, 0), |fs| (fs.f_blocks * fs.f_frsize, (fs.f_blocks - fs.f_bfree) * fs.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_written_as_specified() {
        let metrics = Metrics {
            ts: 1_767_323_045,
            cpu_count: 2,
            cpu_used_pct: 12.5,
            mem_total: 512 << 20,
            mem_used: 128 << 20,
            mem_cache: 64 << 20,
            mem_total_mib: 512,
            mem_used_mib: 128,
            disk_total: 4 << 30,
            disk_used: 1 << 30,
        };
        let golden: serde_json::Value =
            serde_json::from_slice(include_bytes!("../../../spec/agent/metrics.json")).unwrap();
        assert_eq!(serde_json::from_slice::<serde_json::Value>(&json::write(&metrics)).unwrap(), golden);
    }

    #[test]
    fn the_share_of_busy_time_between_two_samples() {
        let before = cpu("cpu  100 0 100 800 0 0 0 0 0 0\ncpu0 ...\n");
        let now = cpu("cpu  150 0 100 850 0 0 0 0 50 0\n");
        assert!((used_pct(before, now) - 50.0).abs() < 1e-9);
        assert!(used_pct(now, now).abs() < 1e-9);
        assert_eq!(cpu(""), CpuSample::default());
    }

    #[test]
    fn memory_in_bytes() {
        let text = "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 400 kB\nBuffers: 1 kB\nCached: 200 kB\nSReclaimable: 9 kB\n";
        assert_eq!(memory(text), Memory { total: 1_024_000, used: 614_400, cache: 215_040 });
    }
}

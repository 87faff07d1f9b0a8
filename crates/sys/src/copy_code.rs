//! Machine code that makes a copy-on-write copy of the process that runs it (x86-64).
//!
//! It is written into another process and one of its threads is sent there by changing
//! nothing but the instruction pointer. From then on it needs nobody: whatever happens to
//! whoever sent it, the thread comes back to where it was with every register as it was.
//!
//! * **The thread** uses no stack and no instruction that changes flags. It makes a helper
//!   (a process that shares its memory, like a vfork), waits for its end, loads all registers
//!   it has used from constants, and jumps back. Entered two bytes later, it jumps back to after
//!   the system call it was in: that is where the kernel leaves it if a signal has interrupted it.
//! * **The helper** is nobody's concern once it has ended: it sends no signal, and the thread reaps
//!   it. It lets the given ranges take part in a fork, forks, and forbids it again.
//! * **The copy** is an orphan, so init reaps it. It blocks all signals, takes a name and a session of
//!   its own, closes every descriptor, and ends, unless a tracer holds it at `hold` and sends it to `keep`.
//!
//! Two gates, words of the code, are for a process under a filter that ends it for system calls like
//! these unless its tracer lives: the thread looks at the gate for a while, and comes back without one if it
//! stays shut. A gate is open until the processor's time stamp is that of its word, so that a
//! thread which comes late, maybe after its tracer has died, finds it shut; zero is open for good.

use std::arch::global_asm;

/// How many ranges of memory can be made part of the copy for its making.
pub const MOST_RANGES: usize = 8;
pub const NAME_BYTES: usize = 16;
/// What the code has at [`MAGIC_OFFSET`]; tells it from other bytes.
pub const MAGIC: u64 = u64::from_le_bytes(*b"aenvcow1");
pub const MAGIC_OFFSET: usize = 16;

global_asm!(
    r#"
    /* Jumps to *open* while the gate's time is not past, and to *shut* if that never was so. No flags. */
    .macro aenv_copy_gate gate, open, shut
    mov r10, [rip + 98f]
70: mov rcx, [rip + \gate]
    jrcxz \open
    rdtsc
    bswap edx
    bswap rdx                           /* both: 32 bits up */
    lea rax, [rax + rdx]
    not rax
    lea rcx, [rcx + rax + 1]            /* what is left of the time: its top byte is 0, or 0xff when it is past */
    bswap rcx
    movzx ecx, cl
    jrcxz \open
    pause
    lea r10, [r10 - 1]
    mov rcx, r10
    jrcxz \shut
    jmp 70b
    .endm

    .pushsection .rodata
    .balign 16
    .globl aenv_copy_start, aenv_copy_again, aenv_copy_interrupted, aenv_copy_hold, aenv_copy_keep, aenv_copy_data, aenv_copy_end
    .hidden aenv_copy_start, aenv_copy_again, aenv_copy_interrupted, aenv_copy_hold, aenv_copy_keep, aenv_copy_data, aenv_copy_end
aenv_copy_start:
    .byte 0xeb, 2f - (. + 1)            /* jmp 2f, in two bytes */
    lea r9, [rip + 90f]                 /* the call was interrupted */
    jmp 1f
    .balign 16
    .ascii "aenvcow1"
2:  lea r9, [rip + 91f]                 /* the call is to be made again, or there is none */
1:  aenv_copy_gate 96f, 4f, 5f
5:  jmp 9f
4:  mov eax, 56                         /* clone(VM | FS | FILES | VFORK), no signal at its end */
    mov edi, 0x4700
    mov esi, 0
    mov edx, 0
    mov r10d, 0
    mov r8d, 0
    syscall
    mov rcx, rax
    jrcxz 20f
    mov rdi, rax
    bswap rcx                           /* a negative number has 0xff on top, a pid has 0 */
    movzx ecx, cl
    jrcxz 6f
    jmp 9f
20: jmp 30f
6:  aenv_copy_gate 97f, 8f, 7f
7:  jmp 9f
8:  mov eax, 61                         /* wait4(helper, NULL, __WALL, NULL) */
    mov esi, 0
    mov edx, 0x40000000
    mov r10d, 0
    syscall
    lea rcx, [rax + 4]                  /* EINTR: again */
    jrcxz 8b
9:  mov rdi, [rip + 92f]
    mov rsi, [rip + 92f + 8]
    mov rdx, [rip + 92f + 16]
    mov r10, [rip + 92f + 24]
    mov r8, [rip + 92f + 32]
    mov r11, [rip + 92f + 40]
    mov rax, [r9]
    mov rcx, [r9 + 8]                   /* how far from here its last jump is */
    lea r9, [rip + 10f]
    lea rcx, [rcx + r9]
    mov r9, [rip + 92f + 48]
    jmp rcx
aenv_copy_again:
10: mov rcx, [rip + 92f + 56]
    jmp qword ptr [rip + 91f + 16]
aenv_copy_interrupted:
    mov rcx, [rip + 92f + 56]
    jmp qword ptr [rip + 90f + 16]

30: mov eax, 14                         /* rt_sigprocmask(SIG_SETMASK, all) */
    mov edi, 2
    lea rsi, [rip + 93f]
    xor edx, edx
    mov r10d, 8
    syscall
    mov r13d, 11                        /* MADV_DOFORK */
    lea r14, [rip + 31f]
    jmp 40f
31: mov eax, 56                         /* clone(SIGCHLD): the copy */
    mov edi, 17
    xor esi, esi
    xor edx, edx
    xor r10d, r10d
    xor r8d, r8d
    syscall
    test rax, rax
    jz 50f
    mov r15, rax
    mov r13d, 10                        /* MADV_DONTFORK */
    lea r14, [rip + 32f]
    jmp 40f
32: xor edi, edi
    test r15, r15
    jns 33f
    mov edi, r15d
    neg edi
33: mov eax, 60                         /* exit(0, or why there is no copy) */
    syscall
    ud2

40: lea r12, [rip + 94f]
41: mov rsi, [r12 + 8]
    test rsi, rsi
    jz 42f
    mov rdi, [r12]
    mov edx, r13d
    mov eax, 28                         /* madvise(start, length, advice) */
    syscall
    add r12, 16
    jmp 41b
42: jmp r14

50: mov eax, 157                        /* prctl(PR_SET_NAME, name) */
    mov edi, 15
    lea rsi, [rip + 95f]
    syscall
    mov eax, 112                        /* setsid() */
    syscall
    mov eax, 436                        /* close_range(0, ~0, 0) */
    xor edi, edi
    mov esi, -1
    xor edx, edx
    syscall
aenv_copy_hold:
    mov eax, 231                        /* exit_group(0) */
    xor edi, edi
    syscall
    ud2
aenv_copy_keep:
    mov eax, 34                         /* pause() */
    syscall
    jmp aenv_copy_keep

    .balign 8
aenv_copy_data:
96: .quad 0                             /* gates */
97: .quad 0
98: .quad 0                             /* spins */
91: .quad 0, 0, 0                       /* rax, last jump, where to go back to */
90: .quad 0, 0, 0                       /* the same when interrupted */
92: .fill 8, 8, 0                       /* rdi rsi rdx r10 r8 r11 r9 rcx */
93: .quad -1                            /* all signals */
95: .fill 2, 8, 0                       /* name */
94: .fill 18, 8, 0                      /* ranges: start, length; ends with zeros */
aenv_copy_end:
    .popsection
    "#
);

unsafe extern "C" {
    static aenv_copy_start: u8;
    static aenv_copy_again: u8;
    static aenv_copy_interrupted: u8;
    static aenv_copy_hold: u8;
    static aenv_copy_keep: u8;
    static aenv_copy_data: u8;
    static aenv_copy_end: u8;
}

/// The constants that the code is given.
#[derive(Clone, Copy, Debug, Default)]
pub struct Constants {
    /// The gates start shut, and not open for good.
    pub gated: bool,
    /// How often the thread looks at a shut gate.
    pub spins: u64,
    /// Result and instruction with which the thread goes on.
    pub again: (u64, u64),
    /// The same if a signal handler ran first and the system call it was in is not made again.
    pub interrupted: (u64, u64),
    /// rdi, rsi, rdx, r10, r8, r11, r9, rcx.
    pub registers: [u64; 8],
    /// Ends with a zero byte.
    pub name: [u8; NAME_BYTES],
    /// Start and length in bytes; a length of zero ends the list.
    pub ranges: [(u64, u64); MOST_RANGES],
}

/// Places in the code, in bytes from its start.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// The entry for a thread whose system call the kernel starts again: it steps back two bytes first.
    pub restart_entry: u64,
    pub hold: u64,
    pub keep: u64,
    pub first_gate: u64,
    pub second_gate: u64,
    pub length: u64,
}

/// What a gate is written with to be open for *ticks* of the processor's time stamp.
pub fn opened_for(ticks: u64) -> [u8; 8] {
    // SAFETY: every x86-64 processor has the instruction, and it touches no memory.
    unsafe { core::arch::x86_64::_rdtsc() }.wrapping_add(ticks).to_le_bytes()
}

fn distance(to: &'static u8) -> u64 {
    let start = &raw const aenv_copy_start;
    (std::ptr::from_ref(to).addr() - start.addr()) as u64
}

pub fn layout() -> Layout {
    // SAFETY: the five symbols are defined above, in read-only data of this program.
    let (hold, keep, data, end) = unsafe { (&aenv_copy_hold, &aenv_copy_keep, &aenv_copy_data, &aenv_copy_end) };
    let data = distance(data);
    Layout {
        restart_entry: 2,
        hold: distance(hold),
        keep: distance(keep),
        first_gate: data,
        second_gate: data + 8,
        length: distance(end),
    }
}

/// The bytes to write, at any address.
pub fn assemble(constants: &Constants) -> Vec<u8> {
    let layout = layout();
    // SAFETY: the code lies between its two symbols, in read-only data of this program.
    let code = unsafe {
        std::slice::from_raw_parts(&raw const aenv_copy_start, usize::try_from(layout.first_gate).unwrap_or(0))
    };
    let mut bytes = code.to_vec();
    let gate = u64::from(constants.gated);
    // SAFETY: the symbols are defined above, in read-only data of this program.
    let (again, interrupted) = unsafe { (&aenv_copy_again, &aenv_copy_interrupted) };
    let last_jump = distance(interrupted) - distance(again);
    let ways = [constants.again.0, 0, constants.again.1, constants.interrupted.0, last_jump, constants.interrupted.1];
    let words = [gate, gate, constants.spins];
    for word in words.iter().chain(&ways).chain(&constants.registers).chain([&u64::MAX]) {
        bytes.extend(word.to_le_bytes());
    }
    bytes.extend(constants.name);
    for (start, length) in constants.ranges.iter().chain([&(0, 0)]) {
        bytes.extend(start.to_le_bytes());
        bytes.extend(length.to_le_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_assembled_is_laid_out_as_said() {
        let bytes = assemble(&Constants { gated: true, name: *b"0123456789abcde\0", ..Constants::default() });

        assert_eq!(bytes.len() as u64, layout().length);
        assert_eq!(bytes[0], 0xeb);
        assert_eq!(bytes[MAGIC_OFFSET..MAGIC_OFFSET + 8], MAGIC.to_le_bytes());
        let gate = usize::try_from(layout().first_gate).unwrap();
        assert_eq!(bytes[gate..gate + 8], 1_u64.to_le_bytes());
        assert!(bytes.windows(16).any(|window| window == b"0123456789abcde\0"));
    }
}

#include "common/base/build_id.h"

#include <elf.h>
#include <link.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace k3 {

namespace {

std::size_t padded(std::size_t bytes) { return (bytes + 3) / 4 * 4; }

/// The digest among `notes`, in hexadecimal.
std::string find_digest(std::span<const unsigned char> notes) {
    while (notes.size() >= sizeof(ElfW(Nhdr))) {
        ElfW(Nhdr) head;
        std::memcpy(&head, notes.data(), sizeof(head));
        notes = notes.subspan(sizeof(head));
        const std::size_t name_bytes = padded(head.n_namesz);
        const std::size_t note_bytes = name_bytes + padded(head.n_descsz);
        if (note_bytes > notes.size()) return {};
        const bool is_gnu = head.n_namesz == 4 && std::memcmp(notes.data(), "GNU", 4) == 0;
        if (is_gnu && head.n_type == NT_GNU_BUILD_ID) {
            constexpr char kDigits[] = "0123456789abcdef";
            std::string text;
            for (unsigned char byte : notes.subspan(name_bytes, head.n_descsz)) {
                text += kDigits[byte >> 4U];
                text += kDigits[byte & 15U];
            }
            return text;
        }
        notes = notes.subspan(note_bytes);
    }
    return {};
}

/// The program itself comes first; its shared libraries do not matter here.
int read_program(dl_phdr_info* info, std::size_t, void* result) {
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const ElfW(Phdr)& part = info->dlpi_phdr[i];
        if (part.p_type != PT_NOTE) continue;
        const auto* begin = reinterpret_cast<const unsigned char*>(info->dlpi_addr + part.p_vaddr);
        std::string digest = find_digest({begin, part.p_memsz});
        if (digest.empty()) continue;
        *static_cast<std::string*>(result) = std::move(digest);
        break;
    }
    return 1;
}

}  // namespace

std::string build_id() {
    std::string digest;
    ::dl_iterate_phdr(read_program, &digest);
    return digest;
}

}  // namespace k3
